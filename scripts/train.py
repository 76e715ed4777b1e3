#!/usr/bin/env python3
"""`polar-trl train` as a file, for `accelerate launch scripts/train.py --config quickstart`."""

from polar_trl.cli.train import main

if __name__ == "__main__":
    main()
