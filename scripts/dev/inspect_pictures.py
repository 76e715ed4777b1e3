#!/usr/bin/env python3
"""Take the pictures of `polar-trl inspect` that docs/inspect.md shows, of a run's folder, by Chromium.

    python scripts/dev/make_demo_run.py --out /tmp/demo-run
    python scripts/dev/inspect_pictures.py /tmp/demo-run --out docs/img
    python scripts/dev/inspect_pictures.py RUN --out docs/img --curves quickstart_run    the curves alone, of any run

A page on which a script failed is no picture, but an error.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
SIZE = {"width": 1440, "height": 860}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--all", action="store_true", help="every view, not only those of the documentation")
    parser.add_argument("--curves", metavar="NAME", help="the page of the run alone, as OUT/NAME.png")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with serve(args.run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        scheme = "dark" if args.dark else "light"
        page = browser.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
        failures: list[str] = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        if args.curves:
            open_page(page, f"{address}#/", ".chart canvas")
            keep(page, args.out / f"{args.curves}.png")
        else:
            take_pictures(page, address, args.out, everything=args.all)
        browser.close()
    if failures:
        sys.exit(f"inspect_pictures: a script failed: {failures[0]}")


@contextmanager
def serve(run: Path, *options: str) -> Iterator[str]:
    """The address of `polar-trl inspect RUN`, running inside the block."""
    command = [sys.executable, "-m", "polar_trl", "inspect", str(run), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        if match is None:
            raise RuntimeError(f"polar-trl inspect {run} gave no address; exit status {process.wait()}")
        yield match[0]
    finally:
        process.terminate()
        process.wait()


def open_page(page: Any, place: str, ready: str) -> None:
    """Go there, and wait for what matches `ready`."""
    page.goto(place)
    page.wait_for_selector(ready)
    page.wait_for_timeout(700)  # fonts, and what is fetched after the first paint


def keep(page: Any, path: Path) -> None:
    """A picture of what is seen, with nothing under the pointer."""
    page.mouse.move(0, 0)
    page.screenshot(path=path)


def take_pictures(page: Any, address: str, out: Path, *, everything: bool) -> None:
    """The pages in the order that a person would open them."""

    def look_at(place: str, ready: str) -> None:
        open_page(page, f"{address}#{place}", ready)

    def take(name: str) -> None:
        keep(page, out / f"inspect_{name}.png")

    look_at("/", ".chart canvas")
    take("run")
    page.locator(".heat").first.scroll_into_view_if_needed()
    page.mouse.wheel(0, 4000)
    page.wait_for_timeout(300)
    take("tasks")
    look_at("/sessions", ".rows .row")
    take("sessions")
    # a session of the second task, a trained one if there is any: compaction, a sub-agent, a second turn
    keys = page.evaluate("fetch('/api/sessions?search=audit').then((reply) => reply.json())")["rows"]
    chosen = max(keys, key=lambda row: bool(row["advantage"]) and not row["left_out"])
    key, task = chosen["key"], chosen["task"]
    if everything:
        look_at(f"/session?key={key}", ".message.reply")
        take("conversation_top")
    look_at(f"/session?key={key}&call=9", ".message.reply")
    take("conversation")
    for color in ("gap", "state", "engine", "version", "advantage", "size") if everything else ("gap",):
        look_at(f"/session?key={key}&view=tokens&track=1&color={color}", ".tk")
        page.keyboard.press("Escape")
        page.click("text=call ›")
        page.wait_for_timeout(500)
        take(f"tokens_{color}" if everything else "tokens")
        page.goto("about:blank")
    look_at(f"/session?key={key}&view=ending", ".diff")
    take("ending")
    look_at(f"/compare?task={task}", ".pair .message.reply")
    take("compare")
    look_at(f"/session?key={key}&view=forks&track=1", ".excerpts figure")
    take("forks")


if __name__ == "__main__":
    main()
