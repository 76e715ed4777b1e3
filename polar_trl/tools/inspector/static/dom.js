// Elements from plain data, and questions to the server. Texts become text nodes only: nothing here parses HTML.

/** An element. `props`: `class`, `on` ({event: listener}), `style` ({name: value}), `data`, else attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

/** JSON from /api/`name`. Throws an Error with the server's sentence. */
export async function ask(name, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  }
  let response;
  try {
    response = await fetch(`/api/${name}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("polar-trl inspect does not answer: it has ended, or the connection to it is gone");
  }
  const content = await response.json();
  if (!response.ok) throw new Error(content.error ?? `status ${response.status}`);
  return content;
}

export function debounce(wait, action) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), wait);
  };
}

export function notice(text, kind = "") {
  return h("p", { class: `notice ${kind}` }, text);
}
