#!/usr/bin/env python3
"""Write docs/settings.md from the help texts of the settings."""

from pathlib import Path

from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.setup.run_setup import RunArguments
from polar_trl.setup.settings import format_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


if __name__ == "__main__":
    PAGE.write_text(format_page(RunArguments, PolarGRPOConfig), encoding="utf-8")
    print(PAGE)
