#!/usr/bin/env python3
"""Link .cache/models/SmolLM2-135M-Instruct to the package's small model, which is made if it is missing."""

from pathlib import Path

from polar_trl.configs.small_model import MODEL_NAME, make_small_model

LINK = Path(__file__).resolve().parents[2] / ".cache" / "models" / MODEL_NAME

if not (LINK / "model.safetensors").exists():
    made = make_small_model()
    LINK.parent.mkdir(parents=True, exist_ok=True)
    LINK.unlink(missing_ok=True)
    LINK.symlink_to(made)
print(LINK)
