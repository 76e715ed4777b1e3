#!/usr/bin/env python3
"""Time `polar-trl inspect` with 20,000 sessions and with one session of 100,000 tokens, in Chromium.

    python scripts/bench/bench_inspect.py

Makes a run of such sessions in a temporary folder, opens the real command on it, and prints one line per figure.
Nothing here fails because a machine is slow.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # the sessions are made as the tests make theirs

from inspect_pictures import CHROMIUM, serve  # noqa: E402
from recorded import ATTEMPT, build_call, write_long_session, write_session  # noqa: E402

from polar_trl.tools.inspector.sessions import SessionIndex  # noqa: E402

LONG = "train-00000-g000-r000"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=220)
    parser.add_argument("--vocabulary", type=Path, default=ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        write_long_session(run, LONG, num_tokens=args.tokens, num_calls=args.calls, vocabulary=49_000)
        write_many(run, args.sessions)
        time_index(run)
        with serve(run, "--tokenizer", str(args.vocabulary)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            time_pages(browser, address, f"{ATTEMPT}/train_00000/{LONG}")
            browser.close()


def write_many(run: Path, count: int) -> None:
    """Sessions of one short call each, 64 to a batch."""
    for number in range(count):
        session = f"train-{1 + number // 64:05d}-g000-r{number % 64:03d}"
        calls = [build_call(session, 0, tuple(range(1, 400)), tuple(range(50)))]
        write_session(run, session, calls, batch=f"train_{1 + number // 64:05d}", reward=float(number % 2))


def time_index(run: Path) -> None:
    """The first look and one after it."""
    index = SessionIndex(run / "sessions")
    for name in ("first", "next"):
        began = time.monotonic()
        found = index.refresh()
        print(f"index of {len(found):,} sessions, {name} look: {time.monotonic() - began:.3f} s")
        time.sleep(2.5)  # until folders count as settled


def time_pages(browser: Any, address: str, key: str) -> None:
    """Each page from an empty browser to its first content, with what was sent for it."""
    for title, place, ready in (
        ("sessions table", "/sessions", ".rows a.row"),
        ("tokens", f"/session?key={key}&view=tokens&color=gap", ".tk.sampled"),
        ("conversation", f"/session?key={key}", "article.call .message.reply"),
    ):
        page = browser.new_page(viewport={"width": 1440, "height": 860})
        sent: list[int] = []
        page.on("requestfinished", lambda asked, sent=sent: sent.append(asked.sizes()["responseBodySize"]))
        began = time.monotonic()
        page.goto(f"{address}#{place}")
        page.wait_for_selector(ready)
        seconds = time.monotonic() - began
        page.wait_for_timeout(500)
        elements = page.evaluate("document.querySelectorAll('*').length")
        print(f"{title}: first content after {seconds:.2f} s, {sum(sent) / 1000:.0f} kB sent, {elements:,} elements")
        if title == "tokens":
            time_scrolling(page, sent)
        page.close()


def time_scrolling(page: Any, sent: list[int]) -> None:
    """From top to bottom in 100 strides, one per frame."""
    before = sum(sent)
    frames = page.evaluate(
        """async () => {
          const box = document.querySelector(".token-scroll"), times = [];
          for (let stride = 1; stride <= 100; stride += 1) {
            const began = performance.now();
            box.scrollTop = (stride / 100) * (box.scrollHeight - box.clientHeight);
            await new Promise(requestAnimationFrame);
            times.push(performance.now() - began);
          }
          return times.sort((a, b) => a - b);
        }"""
    )
    page.wait_for_timeout(500)
    print(
        f"tokens, scrolled through in 100 strides: frames of {frames[50]:.0f} ms (median), {frames[98]:.0f} ms (99 %) "
        f"and {(sum(sent) - before) / 1000:.0f} kB sent"
    )


if __name__ == "__main__":
    main()
