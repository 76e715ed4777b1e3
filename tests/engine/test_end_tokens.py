"""A model may name several tokens that end its turn: none of them is text, in no engine and no format.

The engine is vLLM's CPU build with a tiny model whose second end is sampled every few tokens.
"""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python
from tiny_tokenizers import CHATML, build_tokenizer, encode, read_trl_template, user

from polar_trl.tokens.load import load_renderer

SESSIONS = """
import json, os, sys
from serving import CHAT, http, new_log, serve
from transformers import AutoTokenizer
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.standalone import build_standalone_engine
from polar_trl.tokens.load import load_renderer

if __name__ == "__main__":
    model = sys.argv[1]
    engine = build_standalone_engine(model, cpu=True, max_model_len=512, max_num_seqs=4)
    renderer = load_renderer(AutoTokenizer.from_pretrained(model), model)
    found = []
    with serve(engine, renderer, params=GenerationParams(max_tokens=64)) as proxy:
        endpoint = proxy.open_session(log := new_log())
        for number in range(8):
            messages = [{"role": "user", "content": str(number)}]
            with http(endpoint) as client:
                choice = client.post(CHAT, json={"messages": messages}).json()["choices"][0]
            ids = log.calls[-1].completion.token_ids
            found.append((choice["finish_reason"], ids[-1], choice["message"]["content"]))
    engine.close()
    print(json.dumps({"stops": renderer.stop_token_ids, "found": found}), flush=True)
    os._exit(0)
"""


def build_model(smollm2: Path, folder: Path) -> Path:
    """Write a model of random weights that says <|endoftext|>, its second end, with every tenth token or so."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
        model.model.embed_tokens.weight[:, 0] = 8.0  # as large as all else together, so that it is always about 5.7
        model.lm_head.weight.normal_(std=0.1)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[0] = 0.0
        model.lm_head.weight[0, 0] = math.log(len(tokenizer) / 9) / 5.7
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=2, bos_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_no_end_of_the_turn_is_text(smollm2: Path, tmp_path: Path) -> None:
    model = build_model(smollm2, tmp_path / "model")
    script = tmp_path / "sessions.py"
    script.write_text(SESSIONS)
    done = subprocess.run([find_warm_python(), str(script), str(model)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(answer["stops"]) == {2, 0}
    ended = [text for reason, last, text in answer["found"] if (reason, last) == ("stop", 0)]
    assert ended and not any("<|endoftext|>" in text for text in ended)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 2]}, "config.json": {"eos_token_id": 3}}, {1, 2}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 3}}, {3}),
        ({"config.json": {"text_config": {"eos_token_id": [3, 4]}}}, {3, 4}),
        ({"generation_config.json": {"eos_token_id": 4}}, {4}),
        ({}, set()),
    ],
)
@pytest.mark.parametrize("family", ["template", "qwen3"])
def test_ends_are_read_where_vllm_reads_them(
    files: dict[str, Any], ends: set[int], family: str, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(read_trl_template("qwen3"))
    own = set(load_renderer(tokenizer, str(tmp_path), family=family).stop_token_ids)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert set(load_renderer(tokenizer, str(tmp_path), family=family).stop_token_ids) == own | ends


@pytest.mark.parametrize("family", ["template", "qwen3", "qwen3.5"])
def test_a_turn_that_ended_otherwise_is_closed_as_the_template_closes_it(family: str, tmp_path: Path) -> None:
    files = {"qwen3": "qwen3", "qwen3.5": "qwen3_5_think"}
    tokenizer = build_tokenizer(read_trl_template(files[family]) if family in files else CHATML)
    (end,) = encode(tokenizer, "<|eot|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    renderer = load_renderer(tokenizer, str(tmp_path), family=family)
    prompt = renderer.render([user("q")], ())
    opening = "</think>\n\n" if family == "qwen3.5" else ""
    sampled = encode(tokenizer, f"{opening}There.<|eot|>")
    reply = renderer.parse_reply(prompt, sampled, ())
    assert (reply.message.text, reply.losses) == ("There.", {})
    extended = renderer.extend(prompt, sampled, [user("next")], ())
    assert extended is not None and extended[: len(prompt + sampled)] == prompt + sampled
    rest = tokenizer.decode(extended[len(prompt + sampled) :])
    assert rest.startswith("<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")
