"""The parts of scripts/gpu/throughput.py: its clients are agents, its figures add up, its model says what it must."""

import gc
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from serving import new_log, say, serve

from polar_trl.engine.scripted import ScriptedEngine

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

from agent_clients import Clients, ClientSession  # noqa: E402
from engine_watch import CollectorWatch, EngineWatch, Side, Step, build_key, find_busy  # noqa: E402
from session_lengths import SessionLengths  # noqa: E402
from throughput import build_client_session, build_lengths, chain_words, find_words  # noqa: E402

WORDS = ["alpha", "beta", "gamma"]


def test_clients_continue_their_sessions_until_all_calls_are_begun(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: say("done"))
    with serve(engine) as proxy, Clients(tmp_path, WORDS, 2) as clients:
        logs = [new_log(f"s{number}") for number in range(6)]
        keys = [proxy.open_session(log).api_key for log in logs]
        # each of the two processes runs one slot: sessions of two calls, so that slots take over others
        sessions = [
            ClientSession(number=number, api_key=key, shared_words=4, task_words=3, calls=[(20, 5), (30, 6)])
            for number, key in enumerate(keys)
        ]
        calls = clients.run(proxy.origin, sessions, 2, 7)
    assert len(calls) == 7
    assert all(call.ended_s > call.begun_s for call in calls)
    indices = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.begun_s):
        indices[call.session].append(call.index)
    # the first process has four calls to begin, the second three
    assert dict(indices) == {0: [0, 1], 2: [0, 1], 1: [0, 1], 3: [0]}
    for number, log in enumerate(logs):
        assert [call.parent for call in log.calls] == [None, 0][: len(log.calls)]
        for call, max_tokens, num_words in zip(log.calls, (20, 30), (3, 5), strict=False):
            assert call.request.sampling.max_tokens == max_tokens
            assert len(call.request.messages[0].text.split()) == 4
            assert len(call.request.messages[-1].text.split()) == num_words
            assert call.request.messages[0].text == logs[0].calls[0].request.messages[0].text
        if number < 3:
            assert log.calls[1].request.messages[2].text == "done"


def test_a_call_that_fails_ends_the_measurement(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(ScriptedEngine([])) as proxy, Clients(tmp_path, WORDS, 1) as clients:
        session = ClientSession(number=0, api_key="wrong", shared_words=1, task_words=1, calls=[(5, 1)])
        with pytest.raises(RuntimeError, match="client process failed"):
            clients.run(proxy.origin, [session], 1, 1)
    assert "401" in capfd.readouterr().err


def test_steady_figures_leave_out_both_ends() -> None:
    steps = [
        Step(1.0, 1.5, 0.4, 10, True, 0.3, 9, True, 0.2, 3, 5),
        Step(1.6, 2.0, 0.2, 6, False, 0.1, 6, True, 0.1, 2, 40),
        Step(2.4, 3.0, 0.3, 8, True, 0.0, 8, False, 0.0, 4, 60),
        Step(3.0, 5.0, 0.1, 1, False, 0.0, 1, False, 0.0, 1, 1),
    ]
    side = Side(
        begun_s=0.0,
        ended_s=5.0,
        busy_s=(1.5, 3.0),
        process_cpu_s=2.0,
        steps=steps,
        num_cached_tokens=30,
        num_prompt_tokens=40,
    )
    figures = side.describe("x")
    assert figures["x_tokens_per_s"] == pytest.approx(25 / 5)
    assert figures["x_steady_tokens_per_s"] == pytest.approx(14 / 1.5)
    assert figures["x_step_ms"] == pytest.approx(500)
    assert figures["x_between_share"] == 0.0
    assert figures["x_idle_share"] == pytest.approx(0.4 / 1.5)
    assert figures["x_other_cpu_share"] == pytest.approx((2.0 - 1.0) / 5)
    assert figures["x_hit"] == 0.75
    assert figures["x_gc_share"] == pytest.approx(0.1 / 0.5)
    assert figures["x_gc_max_ms"] == pytest.approx(100)
    assert figures["x_mixed_share"] == 0.5
    assert figures["x_mixed_cpu_ms"] == pytest.approx(200)
    assert figures["x_plain_cpu_ms"] == pytest.approx(300)
    assert figures["x_step_requests"] == 7
    assert figures["x_step_system_ms"] == pytest.approx(50)
    assert figures["x_step_waits"] == 3
    assert figures["x_step_faults"] == 50


class FakeEngine:
    """What `EngineWatch` takes hold of; a step schedules the next of `batches`, and may collect garbage."""

    def __init__(self, batches: list[dict[str, int]], *, collects: bool) -> None:
        self._batches, self._collects = iter(batches), collects
        scheduler = SimpleNamespace(schedule=self._schedule)
        self.engine_core = SimpleNamespace(
            get_output=lambda: SimpleNamespace(outputs=[]), engine_core=SimpleNamespace(scheduler=scheduler)
        )

    def _schedule(self) -> SimpleNamespace:
        batch = next(self._batches)
        return SimpleNamespace(num_scheduled_tokens=batch, total_num_scheduled_tokens=sum(batch.values()))

    def step(self) -> list[object]:
        self.engine_core.engine_core.scheduler.schedule()
        self.engine_core.get_output()
        if self._collects:
            gc.collect()
        return []

    def has_unfinished_requests(self) -> bool:
        return True


def test_steps_tell_prompts_and_the_collector() -> None:
    gc.disable()  # so that no other collection falls into a step
    try:
        steps = []
        for collects in (True, False):
            engine = FakeEngine([{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 40}, {"a": 1}], collects=collects)
            watch = EngineWatch(engine)
            for _ in range(3):
                engine.step()
            watch.close()
            steps.append(watch.steps)
    finally:
        gc.enable()
    for those in steps:
        assert [(step.num_requests, step.is_mixed) for step in those] == [(2, False), (3, True), (1, False)]
    assert all(0 < step.gc_s <= step.cpu_s for step in steps[0])
    assert [step.gc_s for step in steps[1]] == [0, 0, 0]


def test_collections_of_other_threads_do_not_count() -> None:
    watch = CollectorWatch()
    gc.disable()
    try:
        watch.begin()
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        assert watch.seconds == 0
        gc.collect()
        assert watch.seconds > 0
    finally:
        gc.enable()
        watch.close()


def test_busy_is_between_the_first_and_the_last_of_the_slots() -> None:
    assert find_busy([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0], 2) == (2.0, 5.0)


def test_client_sessions_have_the_lengths_of_the_statistics() -> None:
    lengths = SessionLengths(group=0, calls=((5000, 300), (6000, 200), (6900, 100)))
    session = build_client_session(lengths, 7, "key", 1.0)
    assert (session.shared_words, session.task_words) == (4750, 250)
    assert list(session.calls) == [(300, 700), (200, 700), (100, 1)]
    for fitting in build_lengths("5k/30", 4, 1.0):
        assert 15 < len(fitting.calls) <= 30
        assert fitting.num_tokens < 32768
    assert len(build_lengths("20k/40", 1, 0.25)[0].calls) == 40


def test_keys_tell_prompts_apart() -> None:
    assert build_key((1, 2, 3)) == build_key([1, 2, 3])
    assert build_key((1, 2, 3)) != build_key((2, 3))
    assert len(build_key(range(1000))) == 65


def test_every_word_is_followed_by_the_next_one(smollm2: Path) -> None:
    """Weights of `chain_words` in a transformers model: sampling at temperature 1 is certain."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    words = list(find_words(tokenizer).values())
    assert tokenizer.encode("".join(tokenizer.decode([word]) for word in words)) == words
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=1e-3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    loadable = SimpleNamespace(
        parameters=model.parameters, load_weights=lambda pairs: model.load_state_dict(dict(pairs), strict=False)
    )
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=loadable))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner)))
    chain_words(llm, words, len(tokenizer), 64)
    prompt = torch.tensor([[1, words[5], words[17], words[-1], 2]])
    with torch.no_grad():
        logprobs = model(prompt).logits[0].log_softmax(-1)
    best = logprobs.max(-1)
    assert best.indices[1:4].tolist() == [words[6], words[18], words[0]]
    assert set(best.indices.tolist()) <= set(words)
    assert best.values.min() > -1e-6
