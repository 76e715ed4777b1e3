"""The measurement of the gateway, in small."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "bench_gateway.py"


def test_calls_are_measured_without_a_gateway_and_through_it_in_plain_text_and_over_tls() -> None:
    command = [sys.executable, str(SCRIPT), "--calls", "20", "--body-kb", "200", "--concurrency", "4"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^\| (\w[^|]*) \| ([\d.]+) ms \| [\d.]+ / [\d.]+ ms \|$", printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["direct", "gateway", "gateway with TLS"]
