// The conversation as the agent saw it, call by call. A call's texts are fetched when it comes near the screen.

import { ask, h, notice, replace } from "./dom.js";
import { bytes, count, plural, seconds, words } from "./format.js";

const BLOCK = 10;

export async function showConversation(root, page) {
  const view = new Conversation(root, page);
  view.open(page.params.call);
  return view;
}

class Conversation {
  constructor(root, page) {
    this.root = root;
    this.page = page;
    this.cards = [];
    this.blocks = new Map();
    this.list = h("div", { class: "conversation", tabindex: "0", "aria-label": "Conversation" });
    this.filter = h("select", { on: { change: () => this.applyFilter() } });
    replace(root, h("div", { class: "toolbar" }, h("label", {}, "Show", this.filter), h("span", { class: "hint" }, "Each call shows what it adds to the one before.")), this.list);
    // texts that arrive above it must not push away the call that was asked for, until somebody scrolls
    for (const event of ["wheel", "pointerdown", "keydown"]) this.list.addEventListener(event, () => { this.target = null; }, { passive: true });
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.fill(Number(entry.target.dataset.call));
    }, { root: this.list, rootMargin: "600px" });
    this.grow(page.meta);
  }

  close() {
    this.observer.disconnect();
  }

  navigate(params) {
    this.open(params.call);
  }

  open(call) {
    this.target = call === undefined ? null : this.cards[Number(call)];
    this.target?.scrollIntoView({ block: "start" });
  }

  grow(meta) {
    const tracks = meta.tracks.map((track, number) => h("option", { value: number }, `${track.name} (${plural(track.calls.length, "call")})`));
    const chosen = this.filter.value;
    replace(this.filter, h("option", { value: "" }, `all ${plural(meta.calls.length, "call")}`), tracks);
    this.filter.value = chosen;
    this.meta = meta;
    if (!meta.calls.length) replace(this.list, notice("No model call is on record."));
    for (const call of meta.calls.slice(this.cards.length)) {
      const card = h("article", { class: "call", data: { call: call.index } }, this.buildHead(call), h("div", { class: "contents waiting" }));
      this.cards.push(card);
      this.list.append(card);
      this.observer.observe(card);
    }
  }

  applyFilter() {
    const track = this.filter.value;
    this.meta.calls.forEach((call) => {
      this.cards[call.index].hidden = track !== "" && call.track !== Number(track);
    });
    this.list.scrollTop = 0;
  }

  buildHead(call) {
    const track = call.track === null ? null : this.meta.tracks[call.track];
    const [first, last] = call.versions;
    const begins = track?.fork && track.calls[0] === call.index;
    return h("header", {},
      h("h2", {}, `Call ${call.index}`),
      h("span", { class: `chip ${call.purpose}` }, call.purpose),
      track ? h("a", { class: "chip", href: this.page.address({ view: "tokens", track: call.track, call: call.index }) }, track.name) : h("span", { class: "chip" }, call.text_only ? "text only" : "nothing sampled"),
      begins ? h("a", { class: "chip fork", href: this.page.address({ view: "forks", track: call.track }) }, `fork: ${track.fork.reason}`) : null,
      h("span", { class: "meta" },
        h("span", {}, words(call.dialect)),
        call.text_only
          ? h("span", {}, "text without token ids")
          : [h("span", {}, h("b", {}, count(call.prompt_tokens)), " prompt tokens"), h("span", {}, h("b", {}, count(call.sampled_tokens)), " sampled")],
        h("span", {}, seconds(call.seconds)),
        h("span", { class: call.finish_reason === "length" ? "warn" : "" }, `finish: ${words(call.finish_reason)}`),
        h("span", {}, first === last ? `policy version ${first}` : `policy versions ${first} to ${last}`),
        call.stop_text ? h("span", {}, `stopped at ${JSON.stringify(call.stop_text)}`) : null));
  }

  async fill(index) {
    const body = this.cards[index].querySelector(".contents.waiting");
    if (!body) return;
    body.classList.remove("waiting");
    const block = Math.floor(index / BLOCK);
    const isWhole = (block + 1) * BLOCK <= this.meta.calls.length;
    if (!this.blocks.has(block)) this.blocks.set(block, ask("calls", { key: this.page.params.key, first: block * BLOCK, count: BLOCK }));
    try {
      const calls = await this.blocks.get(block);
      const call = calls[index % BLOCK];
      if (!isWhole || !call) this.blocks.delete(block);
      if (call) {
        this.drawCall(body, call);
        this.target?.scrollIntoView({ block: "start" });
      }
      else body.classList.add("waiting");
    } catch (error) {
      this.blocks.delete(block);
      replace(body, notice(error.message, "bad"));
    }
  }

  drawCall(body, call) {
    const asked = Object.entries(call.asked).map(([name, value]) => `${name} ${value}`).join(", ");
    replace(
      body,
      call.tools ? this.buildTools(call) : null,
      call.repeated ? h("p", { class: "repeated" }, call.repeats_reply ? `Goes on from call ${call.repeated_of} and its reply (${plural(call.repeated, "message")})` : `The first ${plural(call.repeated, "message")} as in call ${call.repeated_of}`) : null,
      call.messages.map((message) => this.buildMessage(call.index, message, false)),
      this.buildMessage(call.index, call.reply, true),
      asked || call.unread.length ? h("p", { class: "asked" }, asked ? `The agent asked for ${asked}.` : "", call.unread.length ? ` Not understood and ignored: ${call.unread.join(", ")}.` : "") : null,
    );
  }

  buildTools(call) {
    const schemas = h("div");
    const details = h("details", { class: "message tools" },
      h("summary", {}, h("span", { class: "role" }, "tools"), h("span", { class: "names" }, call.tools.length ? call.tools.join(", ") : "none")), schemas);
    details.addEventListener("toggle", () => {
      if (details.open && !schemas.hasChildNodes()) schemas.append(this.buildText(call.index, { part: "tools", text: "", length: 1, next: 0 }, "code"));
    });
    return details;
  }

  buildMessage(index, message, isReply) {
    const isHidden = ["system", "developer"].includes(message.role);
    const parts = [
      message.reasoning ? h("details", { class: "reasoning", open: isReply }, h("summary", {}, `reasoning (${plural(message.reasoning.length, "character")})`), this.buildText(index, message.reasoning, "prose")) : null,
      message.text.length ? this.buildText(index, message.text, message.role === "tool" ? "code" : "prose") : null,
      message.tool_calls.map((call) => h("div", { class: "tool-call" },
        h("div", { class: "tool-name" }, h("b", {}, call.name), call.malformed ? h("span", { class: "chip fork" }, "malformed arguments") : null),
        call.arguments.length ? this.buildText(index, call.arguments, "code") : null)),
      message.images ? h("p", { class: "hint" }, plural(message.images, "image")) : null,
    ];
    const isEmpty = !message.reasoning && !message.text.length && !message.tool_calls.length && !message.images;
    if (isEmpty) parts.push(h("p", { class: "hint" }, "empty"));
    const role = h("span", { class: "role" }, isReply ? "model" : message.role);
    const name = `message ${isReply ? "reply" : message.role}`;
    if (isHidden) return h("details", { class: name }, h("summary", {}, role, h("span", { class: "names" }, `${message.text.text.slice(0, 110).trim()}${message.text.length > 110 ? " …" : ""}`, h("span", { class: "size" }, plural(message.text.length, "character")))), parts);
    return h("div", { class: name }, role, h("div", { class: "body" }, parts));
  }

  buildText(call, block, kind) {
    const text = h("pre", { class: `text ${kind}` }, block.text);
    if (block.next >= block.length && block.text) return text;
    let next = block.next;
    const button = h("button", { type: "button", class: "more" });
    const label = (length) => replace(button, next ? `Show more (${bytes(length - next)} of ${bytes(length)} left)` : "Show");
    const fetchMore = async () => {
      button.disabled = true;
      try {
        const more = await ask("text", { key: this.page.params.key, call, part: block.part, offset: next });
        text.append(document.createTextNode(more.text));
        next = more.next;
        if (next >= more.length) button.remove();
        else label(more.length);
      } catch (error) {
        button.replaceWith(notice(error.message, "bad"));
      }
      button.disabled = false;
    };
    button.addEventListener("click", fetchMore);
    label(block.length);
    if (block.part === "tools") fetchMore();
    return h("div", { class: "cut" }, text, button);
  }
}
