#!/usr/bin/env python3
"""Makes the variants of the sample model that tests run on, once per build tree: models.py FOLDER"""

import os
import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "models/kjv-moe-q8_0.gguf"
TYPES = ("F32", "Q8_0", "Q4_K_M")


def path_of(kind):
    """The variant's file, once made."""
    return Path(os.environ["LINKCPP_TEST_MODELS"]) / f"kjv-moe-{kind.lower()}.gguf"


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["LINKCPP_TEST_MODELS"] = str(folder)
    quantize = Path(os.environ["LINKCPP_LLAMA_BIN"]) / "llama-quantize"
    for kind in TYPES:
        path = path_of(kind)
        if path.exists() and path.stat().st_mtime >= SAMPLE.stat().st_mtime:
            continue
        part = path.with_suffix(".part")
        result = subprocess.run([quantize, "--allow-requantize", SAMPLE, part, kind], capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"llama-quantize {kind} failed:\n{result.stderr[-3000:]}")
        part.rename(path)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
