"""`polar-trl inspect` in a real browser: what a person sees, what stays out of the page, and how large it gets."""

import importlib.util
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import (
    ATTEMPT,
    build_call,
    describe_rollout,
    name_record,
    write_long_session,
    write_rows,
    write_session,
)

from polar_trl.types import AgentExit, GradeReport, Message, ToolCall

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
LONG, NASTY, SMALL = "train-00000-g000-r000", "train-00001-g000-r000", "train-00002-g000-r{:04d}"
NUM_SMALL = 1500
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
LAST_TOKEN = "Math.max(...[...document.querySelectorAll('.window .tk')].map(e => e.dataset.at))"
COUNT_LINE_PIXELS = """(() => {
  const canvas = document.querySelector('.chart canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data[i] === 11 && data[i + 1] === 102 && data[i + 2] === 173;
  return count;
})()"""
"""Pixels of the first chart in the colour of its first series, #0b66ad."""
PICTURES = ("run", "tasks", "sessions", "conversation", "tokens", "forks", "ending", "compare")
MAX_ELEMENTS = 6000
"""Of the whole document, whatever a session's length."""


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / "dev" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load_script("inspect_pictures")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; its absence fails the tests, since scripts/test.sh installs it."""
    from playwright.sync_api import sync_playwright

    assert Path(pictures.CHROMIUM).exists(), f"no {pictures.CHROMIUM}: apt-get install chromium (scripts/test.sh does)"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=pictures.CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "run"
    write_long_session(folder, LONG, num_tokens=100_000, num_calls=220, vocabulary=49_000)
    write_nasty_session(folder)
    for number in range(NUM_SMALL):
        name = SMALL.format(number)
        write_session(folder, name, [build_call(name, 0, (1,), (2,))], batch="train_00002", reward=number / NUM_SMALL)
    (folder / "settings.json").write_text(json.dumps({"model": str(smollm2), "agent": EVIL, "max_steps": 50}))
    (folder / "log.jsonl").write_text("".join(json.dumps(build_line(step)) + "\n" for step in (1, 2, 3)))
    lesson = {"step": 1, "mode": "train", "attempt": "a", "reasons": [], "taught_nothing": EVIL, "try": "more tasks"}
    (folder / "reasons.jsonl").write_text(json.dumps(lesson) + "\n")
    return folder


def build_line(step: int) -> dict[str, Any]:
    gap = "sampling/sampling_logp_difference"
    return {
        "step": step,
        "reward": 0.125 * step,
        f"{gap}/mean": 1e-3,
        f"{gap}/max": 0.1 * step,
        "polar/phase/rollouts_s": 3.0,
        "polar/phase/training_s": 2.0,
    }


def write_nasty_session(folder: Path) -> None:
    """Record the worst text that agents may produce, and a fork whose texts hold it as well."""
    tool = Message(role="tool", text=EVIL + "\x1b[31m\x00\u202e" + "x" * 1_000_000, tool_call_id="a")
    call = ToolCall(id="a", name=EVIL, arguments=json.dumps({"command": f"echo '{EVIL}'"}))
    reply = Message(role="assistant", text=EVIL, reasoning=EVIL, tool_calls=(call,))
    system = Message(role="system", text=EVIL)
    calls = [
        build_call(NASTY, 0, (1, 2, 3), (10, 11, 12), messages=(system,), reply=reply),
        build_call(NASTY, 1, (1, 2, 3, 10, 11, 12, 7), (13, 14), messages=(system, reply, tool), parent=0),
        build_call(NASTY, 2, (1, 9, 9), (15,), messages=(Message(role="user", text=EVIL),)),
    ]
    exits = AgentExit(exit_code=1, output_tail=EVIL)
    report = GradeReport(output_tail=EVIL, failed_tests=(EVIL,), missing_tests=(EVIL,), num_failed=1, num_missing=200)
    diff = f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-{EVIL}\n+\x1b]0;{EVIL}\n# {EVIL}"
    write_session(
        folder, NASTY, calls, batch="train_00001", task_id=EVIL, error=EVIL, reward=None, agent_exit=exits,
        grading=report, changes=diff,
    )  # fmt: skip


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with pictures.serve(run) as address:
        yield address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that fails the test if a script fails, a text runs, a dialog opens, or anything is fetched elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"a script failed: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if is_failure(message) else None)
    page.on("dialog", lambda dialog: (wrong.append("a dialog opened"), dialog.dismiss()))
    page.on("request", lambda asked: None if asked.url.startswith(address) else wrong.append(f"asked for {asked.url}"))
    yield page
    assert page.evaluate("window.hacked") is None
    assert wrong == []
    page.close()


def key_of(name: str, batch: str) -> str:
    return f"{ATTEMPT}/{batch}/{name}"


def is_failure(message: Any) -> bool:
    """Tell whether a script or a policy complains; status 400 (a wrong question) is the browser's own remark."""
    return message.type == "error" and "status of 400" not in message.text


def until(page: Any, expression: str) -> None:
    """Wait for an expression. Playwright's own way evaluates texts in the page, which the page's policy forbids."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it never came true: {expression}")


def count_elements(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def read_detail(page: Any) -> dict[str, str]:
    pairs = page.eval_on_selector_all(
        ".detail > div", "all => all.map(e => [e.firstChild.textContent, e.lastChild.textContent])"
    )
    return dict(pairs)


def test_the_run_shows_curves_that_grow(page: Any, address: str, run: Path) -> None:
    page.goto(address)
    page.wait_for_selector(".chart canvas")
    model = json.loads((run / "settings.json").read_text())["model"]
    assert page.text_content(".facts").startswith(f"Model{Path(model).name}")
    assert EVIL in page.text_content(".facts")
    assert f"1 step taught nothing, the latest because: {EVIL}. Try: more tasks." in page.text_content("main")
    reward = page.locator(".chart", has_text="Mean over the rollouts of a step")
    until(page, f"{COUNT_LINE_PIXELS} > 300")
    assert "step 3" in reward.inner_text() and "0.375" in reward.inner_text()
    reward.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "step 2" in reward.inner_text() and "0.25" in reward.inner_text()
    page.locator(".top").click()
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps(build_line(4)) + "\n")
    until(page, "document.body.innerText.includes('step 4 of 50')")
    until(page, "document.querySelector('.chart .legend').innerText.includes('0.5')")
    assert page.evaluate(COUNT_LINE_PIXELS) > 300


def test_the_table_of_many_sessions_holds_what_is_on_the_screen(page: Any, address: str) -> None:
    page.goto(f"{address}#/sessions")
    page.wait_for_selector(".rows a.row")
    assert f"{NUM_SMALL + 2:,} sessions" in page.text_content(".summary")
    assert page.locator(".rows .row").count() < 60
    for cell in (page.locator(".rows .seconds").first, page.locator(".rows .ended").first):
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= 1280  # the width of the page; only the reason is scrolled to
    page.evaluate("document.querySelector('.table').scrollTop = 1e9")
    until(page, f"[...document.querySelectorAll('.rows a.row')].some(row => row.textContent.includes('{LONG}'))")
    assert page.locator(".rows .row").count() < 60
    assert count_elements(page) < 1500
    page.click("button:has-text('Reward')")
    page.click("button:has-text('Reward')")
    until(page, "document.querySelector('[aria-sort=descending]')?.textContent.startsWith('Reward')")
    until(page, f"document.querySelector('.rows a.row').textContent.includes('{LONG}')")
    page.fill("input[placeholder='1, >0.5, none']", "none")
    until(page, "document.querySelector('.summary').textContent.startsWith('1 of')")
    row = page.locator(".rows a.row")
    assert row.count() == 1 and EVIL in row.text_content()
    page.fill("input[placeholder='1, >0.5, none']", "nonsense")
    until(page, "document.querySelector('.summary').textContent.includes('give a number')")
    page.click("text=Clear")
    until(page, "document.querySelectorAll('.rows a.row').length > 20")
    page.locator(".rows a.row").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.row") == "2"
    page.keyboard.press("Enter")
    page.wait_for_selector("article.call")
    assert page.text_content("h1") == SMALL.format(2)


def test_whatever_an_agent_wrote_is_text(page: Any, address: str) -> None:
    page.goto(f"{address}#/session?key={key_of(NASTY, 'train_00001')}")
    until(page, "document.querySelectorAll('article.call .message.reply').length === 3")
    assert page.text_content("h1") == NASTY
    assert page.text_content(".notice.bad") == EVIL
    system = page.locator("details.system").first
    assert system.get_attribute("open") is None
    tool = page.locator(".message.tool .cut")
    assert tool.locator("pre").text_content().startswith(EVIL + "␛[31m␀⟨U+202E⟩xxx")
    assert len(tool.locator("pre").text_content()) < 5000
    assert "1.0 MB" in tool.locator("button").text_content()
    while tool.locator("button").count():
        tool.locator("button").click()
        until(page, "!document.querySelector('.message.tool .cut button')?.disabled")
    assert len(tool.locator("pre").text_content()) > 1_000_000
    assert page.locator(".tool-name b").first.text_content() == EVIL
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    page.click("text=Forks and drops")
    page.wait_for_selector(".excerpts figure")
    assert "no reward" in page.text_content(".plain")
    assert page.text_content(".fork-card .reason") == "new conversation"
    assert page.locator(".differs").count() == 2


def test_how_a_session_ended_is_text_too(page: Any, address: str) -> None:
    page.goto(f"{address}#/session?key={key_of(NASTY, 'train_00001')}&view=ending")
    page.wait_for_selector(".diff")
    assert [page.text_content(f".diff .{kind}") for kind in ("added", "removed", "note", "hunk")] == [
        f"+␛]0;{EVIL}\n", f"-{EVIL}\n", f"# {EVIL}\n", "@@ -1 +1 @@\n",
    ]  # fmt: skip
    assert page.locator(".tests li").all_text_contents() == [EVIL, EVIL]
    assert "and 199 more tests" in page.text_content(".ending")
    assert page.locator(".ending h2").all_text_contents()[0] == "Agent: exit code 1"
    page.goto(address)
    page.wait_for_selector(".ends a")
    assert EVIL in page.text_content(".ends")


def test_a_cell_of_the_map_leads_to_its_sessions(page: Any, address: str) -> None:
    page.goto(address)
    page.click(".heat .cell")
    page.wait_for_selector(".rows a.row")
    assert page.locator(".rows a.row").count() == 1 and LONG in page.text_content(".rows")
    assert "task task" in page.text_content(".filters")
    page.click("text=Clear")
    until(page, "document.querySelectorAll('.rows a.row').length > 20")


def test_two_sessions_of_a_task_side_by_side(browser: Any, run: Path, tmp_path: Path) -> None:
    reply = Message(role="assistant", text="another answer " + EVIL)
    write_session(tmp_path / "other", "only", [build_call("only", 0, (1,), (2,), reply=reply)], changes="+ new")
    failures: list[str] = []
    with pictures.serve(run, str(tmp_path / "other")) as address:
        page = browser.new_page(viewport=pictures.SIZE)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(address)
        until(page, "document.querySelectorAll('#nav a').length === 5")
        assert page.locator("#nav a").all_text_contents() == [
            "run",
            "run: sessions",
            "other",
            "other: sessions",
            "Compare",
        ]
        page.click("text=other: sessions")
        until(page, "document.querySelector('.rows a.row')?.textContent.includes('only')")
        page.click(".rows a.row")
        page.wait_for_selector("article.call")
        page.click(".title >> text=Compare")
        until(page, "document.querySelectorAll('.pair .message.reply').length >= 2")
        sides = page.locator(".side")
        assert "another answer " + EVIL in sides.first.text_content() and "only" in sides.first.text_content()
        assert "run · " in page.evaluate("document.querySelectorAll('.side > select')[1].selectedOptions[0].text")
        page.locator(".toolbar select").nth(1).select_option("ending")
        until(page, "document.querySelector('.side .diff')?.textContent.includes('+ new')")
        assert page.evaluate("window.hacked") is None
        page.close()
    assert failures == []


def test_a_session_of_100000_tokens_keeps_the_page_small(page: Any, address: str, run: Path) -> None:
    key = key_of(LONG, "train_00000")
    page.goto(f"{address}#/session?key={key}&view=tokens&color=gap")
    page.wait_for_selector(".tk.sampled")
    assert page.locator(".track").count() == 1
    sizes = [count_elements(page)]
    for share in (0.25, 0.5, 0.9, 1.0):
        page.evaluate(f"(e => {{ e.scrollTop = {share} * e.scrollHeight; }})(document.querySelector('.token-scroll'))")
        until(page, f"{LAST_TOKEN} > {share} * 98_000")
        sizes.append(count_elements(page))
    assert page.evaluate(LAST_TOKEN) == 220 * (100_000 // 220) - 1
    assert max(sizes) < MAX_ELEMENTS
    assert page.locator(".tl").count() < 90

    page.click("text=Largest gap")
    page.wait_for_selector(".caret")
    row = next(line for line in read_rows(run) if line["type"] == "row" and line["rollout"] == LONG)
    engine = read_engine(run)
    gaps = [trainer - value for trainer, value in zip(row["logprobs"], engine, strict=True)]
    largest = max(range(len(gaps)), key=lambda index: abs(gaps[index]))
    detail = read_detail(page)
    position = [position for start, end in row["trained"] for position in range(start, end)][largest]
    assert detail["Position"] == f"{position:,}"
    assert math.isclose(float(detail["Gap"].replace("−", "-")), gaps[largest], rel_tol=6e-3)
    assert math.isclose(float(detail["Engine logprob"].split()[0].replace("−", "-")), engine[largest], rel_tol=1e-3)
    assert detail["Advantage"] == "+0.75" and detail["State"].startswith("trained, call ")

    page.locator(".token-scroll").focus()
    page.keyboard.press("ArrowRight")
    assert read_detail(page)["Position"] == f"{position + 1:,}"
    for name, words in (("version", "version 1"), ("state", "context"), ("engine", "certain"), ("advantage", "+0.75")):
        page.locator(f"input[value={name}]").check(force=True)
        until(page, f"document.querySelector('.scale').textContent.includes('{words}')")
    assert page.locator(".tk.sampled[style*=background-color]").count() > 0
    assert page.locator(".tk:not(.sampled)[style*=background-color]").count() == 0

    page.click("text=Conversation")
    until(page, "document.querySelectorAll('article.call').length === 220")
    page.wait_for_selector("article.call .message.reply")
    assert page.locator(".contents.waiting").count() > 150, "calls off the screen are not fetched"
    page.evaluate("document.querySelector('.conversation').scrollTop = 1e9")
    page.wait_for_selector("article.call[data-call='219'] .message.reply")


def read_rows(run: Path) -> list[dict[str, Any]]:
    paths = sorted((run / "rows").rglob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def read_engine(run: Path) -> list[float]:
    lines = (run / name_record(LONG)).read_text().splitlines()
    calls = [line for line in map(json.loads, lines) if line["type"] == "call"]
    return [value for call in calls for value in call["completion"]["logprobs"]]


def test_a_session_is_followed_while_it_runs(page: Any, address: str, run: Path) -> None:
    name = f"train-00009-g000-r000-{random.randrange(10**6)}"
    calls = [build_call(name, 0, (1,), (2,)), build_call(name, 1, (1, 2, 3), (4,), parent=0)]
    path = write_session(run / "aside", name, calls, batch="train_00009", task_id="live")
    whole = path.read_bytes().splitlines(keepends=True)
    target = run / "sessions" / ATTEMPT / "train_00009" / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"".join(whole[:2]))
    os.utime(target, (time.time(), time.time()))
    page.goto(f"{address}#/sessions?search={name}")
    until(page, "document.querySelector('.rows a.row .stage')?.textContent === 'running'")
    page.locator(".rows a.row").click()
    until(page, "document.querySelectorAll('article.call .message.reply').length === 1")
    with target.open("ab") as file:
        file.writelines(whole[2:])
    until(page, "document.querySelectorAll('article.call .message.reply').length === 2")
    assert "completed" in page.text_content(".session-head")
    write_rows(run, 9, [describe_rollout(name, 0.0, "zero_variance") | {"record": name_record(name, "train_00009")}])
    until(page, "document.querySelector('.session-head').textContent.includes('not trained in step 9')")


def open_new(page: Any, address: str, name: str) -> None:
    """The page of a session that was written a moment ago, once the table has it."""
    page.goto(f"{address}#/sessions?search={name}")
    page.locator(".rows a.row").click()
    page.wait_for_selector(".session-head h1")


def test_an_open_session_learns_what_training_did(page: Any, address: str, run: Path) -> None:
    name, batch = f"train-00010-g000-r000-{random.randrange(10**6)}", "train_00010"
    write_session(run, name, [build_call(name, 0, (1,), (2,))], batch=batch)
    open_new(page, address, name)
    page.click(".tabs >> text=Tokens")
    page.wait_for_selector(".tk")
    head = "document.querySelector('.session-head').textContent"
    assert "trained" not in page.evaluate(head)
    told = {"rollout": name, "record": name_record(name, batch)}
    write_rows(run, 10, [describe_rollout(name, 0.625) | told])
    until(page, f"{head}.includes('for step 10') && {head}.includes('+0.625')")
    row = {"type": "row", "calls": [0], "num_tokens": 2, "num_trainable": 1, "trained": [[1, 2]], "step": 10}
    write_rows(run, 10, [row | told | {"advantage": 0.625, "logprobs": [-0.75]}])
    until(page, f"{head}.includes('trained in step 10')")
    page.wait_for_selector(".tk")
    page.click(".tk[data-at='1']")
    until(page, "document.querySelector('.detail')?.textContent.includes('−0.25')")


def test_a_session_of_an_evaluation_was_trained_in_no_step(page: Any, address: str, run: Path) -> None:
    name, batch = f"eval-00006-g000-r000-{random.randrange(10**6)}", "eval_00006"
    write_session(run, name, [build_call(name, 0, (1,), (2,))], batch=batch)
    write_rows(run, 6, [describe_rollout(name, 0.0) | {"record": name_record(name, batch)}], mode="eval")
    open_new(page, address, name)
    until(page, "document.querySelector('.session-head')?.textContent.includes('eval 6, after step 6')")
    assert "trained" not in page.text_content(".session-head")


def test_dark_and_narrow(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 800}, color_scheme="dark")
    page.goto(address)
    page.wait_for_selector(".chart canvas")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    for place in (
        "/",
        f"/session?key={key_of(NASTY, 'train_00001')}",
        f"/session?key={key_of(LONG, 'train_00000')}&view=tokens",
    ):
        page.goto(f"{address}#{place}")
        page.wait_for_selector(".chart canvas, article.call, .tk")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
    page.close()


def test_the_demo_run_and_its_pictures(tmp_path: Path, browser: Any, smollm2: Path) -> None:
    """The real proxy, runner and sandbox make sessions with every kind of fork; each view of them is drawn."""
    out = tmp_path / "demo"
    load_script("make_demo_run").make_run(out, smollm2, steps=2, group=3, seed=1)
    failures: list[str] = []
    with pictures.serve(out) as address:
        page = browser.new_page(viewport=pictures.SIZE)
        page.on("pageerror", lambda error: failures.append(str(error)))
        pictures.take_pictures(page, address, tmp_path, everything=False)
        reasons = page.eval_on_selector_all(".fork-card .reason", "all => all.map(e => e.textContent)")
        page.close()
    assert failures == []
    assert {"compaction", "sub-agent", "thinking dropped"} <= set(reasons)
    names = {path.name: path.stat().st_size for path in tmp_path.glob("inspect_*.png")}
    assert set(names) == {f"inspect_{name}.png" for name in PICTURES}
    assert all(20_000 < size < 250_000 for size in names.values()), names
