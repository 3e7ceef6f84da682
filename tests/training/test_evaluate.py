"""Evaluation: no dropout, no router loss, no gradient; and the mode goes back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.base.batches import TARGET_TOKENS
from shardwise.base.interfaces import Evaluation
from shardwise.config import Lora, Parallel, UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.training import evaluate as evaluation
from shardwise.training.evaluate import SAMPLE_TOKENS, encode_prompt, evaluate, greedy_sample
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


def _evaluate() -> tuple[float, float, float, int, int]:
    cfg = run_config(Cell("qwen3_next", "single", "lora"))
    cfg = replace(
        cfg, lora=Lora(r=4, dropout=0.5), model=replace(cfg.model, router_aux_loss_coef=1.0)
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    batches = microbatches(cfg, mesh, 1)
    trained, _ = forward_backward(job.pm, batches, mesh)
    evaluation = evaluate(job.pm, [batches], mesh, step=3)
    (part,) = job.pm.parts
    part.eval()
    with torch.no_grad():
        expected = sum(part(batch) for batch in batches) / sum(
            batch.num_target_tokens() for batch in batches
        )
    return trained.item(), evaluation.loss, expected.item(), evaluation.tokens, evaluation.step


def test_neither_dropout_nor_router_loss():
    ((trained, loss, expected, tokens, step),) = run_ranks(1, _evaluate)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert trained > loss + 0.5  # the router loss is about 1 per token here
    # Row j of step 1 has 24 - (7 j + 3) % 20 targets: 21 14 7 20 13 6 19 12.
    assert (tokens, step) == (112, 3)


def _rounded_by_each_rank() -> Evaluation:
    cfg = replace(run_config(Cell("llama", "single", "full")), parallel=Parallel(tp=2))
    mesh = build_mesh(cfg, torch.device("cpu"))
    run = lambda *_: torch.tensor(200.0 + dist.get_rank())  # noqa: E731
    pm: Any = SimpleNamespace(run=run, objective=TARGET_TOKENS)
    return evaluate(pm, [microbatches(cfg, mesh, 1)], mesh, step=3)


def test_every_rank_has_the_same_loss():
    """Ranks of a tensor axis compute it each for themselves, and all must stop or save alike."""
    one, other = run_ranks(2, _rounded_by_each_rank)
    assert one == other
    assert one.loss == 200 / 112


def _not_finite() -> str:
    cfg = run_config(Cell("llama", "single", "full"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    with torch.no_grad():
        next(p for _, p in job.pm.named_parameters()).fill_(float("nan"))
    with pytest.raises(UserError) as raised:
        evaluate(job.pm, [microbatches(cfg, mesh, 1)], mesh, step=5)
    return str(raised.value)


def test_a_loss_that_is_not_finite_is_an_error():
    assert run_ranks(1, _not_finite)[0].startswith("validation loss after step 5 is nan")


def _sample(prompt: str) -> tuple[str, int]:
    cfg = run_config(Cell("llama", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, sample=prompt))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    beats = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "beat", lambda: beats.append(1))
        text = greedy_sample(
            job.pm, Letters(), encode_prompt(cfg, Letters(), job.run.positions) or [], mesh
        )
    return text, len(beats)


class Letters:
    """A tokenizer: a letter is a token."""

    eos_token_id = None

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_each_token_of_a_sample_is_progress():
    ((text, beats),) = run_ranks(1, _sample, "ab")
    assert text.startswith("ab")
    assert len(text) == 2 + SAMPLE_TOKENS
    assert beats == SAMPLE_TOKENS


def test_a_sample_may_use_every_position_that_is_learned():
    cfg = run_config(Cell("gpt2", "single", "full"))
    # The model reads the prompt and all new tokens but the last: 11 + 48 - 1 = 58.
    for length, positions in ((11, 58), (11, None)):
        fits = replace(cfg, training=replace(cfg.training, sample="a" * length))
        assert encode_prompt(fits, Letters(), positions) == [ord("a")] * length
    beyond = replace(cfg, training=replace(cfg.training, sample="a" * 12))
    with pytest.raises(
        UserError, match=r"^training\.sample has 12 tokens and is continued by 48, but .* only 58 "
    ):
        encode_prompt(beyond, Letters(), 58)
    assert encode_prompt(cfg, Letters(), 58) is None
