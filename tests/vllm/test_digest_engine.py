"""Digests of what vLLM's own engine has computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import Engine, Spec
from forks import Engines
from tiny import BLOCK, prompt

from kvbelay.vllm.digest import EMPTY, Hasher, combine
from kvbelay.vllm.layouts import group_layouts

SHORT, LONG = 3, 12
"""Prompts of 110 and of 206 tokens."""
NONE = str(EMPTY)
SPECS = {"llama": Spec(which="plain"), "hybrid": Spec(which="plain", model="hybrid", blocks=168)}


def hasher(vllm_config: Any, kv_cache_config: Any) -> Hasher:
    """Of the caches that a connector would be given."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return Hasher.of({name: layers[name].kv_cache for name in names}, kv_cache_config, vllm_config)


def of_worker(worker: Any, group: int, blocks: list[int], tokens: int) -> tuple[str, list[int]]:
    """On one rank."""
    here = hasher(worker.vllm_config, worker.model_runner.kv_cache_config)
    return here.form(group), here.digests(group, blocks, 0, tokens)


def hashed(engine: Engine, name: str) -> dict[str, list[str]]:
    """The digests of a request's prompt, of each block, under the form of each group of layers."""
    found, tokens = {}, len(prompt(engine.numbers[name]))
    for group, blocks in enumerate(engine.scheduler.kv_cache_manager.get_block_ids(name)):
        whole = blocks[: -(-tokens // BLOCK)]
        said = engine.core.model_executor.collective_rpc(of_worker, args=(group, whole, tokens))
        (form,) = {form for form, _ in said}
        found[f"{group}: {form}"] = [str(digest) for digest in combine([digests for _, digests in said])]
    return found


def computed(engine: Engine, name: str, number: int) -> dict[str, list[str]]:
    """Compute a prompt, and hash it."""
    engine.add(name, number, new=4)
    engine.run(lambda: bool(engine.tokens.get(name)))
    found = hashed(engine, name)
    engine.finish()
    return found


def damaged(engine: Engine) -> dict[str, list[int]]:
    """Which of a prompt's blocks, in all groups, have another digest than before, after what befell it."""
    engine.add("r", SHORT, new=60)
    engine.run(lambda: bool(engine.tokens.get("r")))
    before = hashed(engine, "r")

    def changed() -> list[int]:
        now = hashed(engine, "r")
        return [at for form in before for at, digest in enumerate(now[form]) if digest != before[form][at]]

    engine.steps(40)
    found = {"tokens came after it": changed()}
    (layer, cache), *_ = engine.layers(0)
    blocks = engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    bits = cache.view(torch.int32)
    bits[blocks[1], 1, 5, 9] ^= 1
    found[f"a bit flipped in {layer}"] = changed()
    bits[blocks[1], 1, 5, 9] ^= 1
    found["and back"] = changed()
    engine.fill(0, {blocks[2]})
    found["poison in a block"] = changed()
    return found


def elsewhere(engine: Engine, number: int) -> list[dict[str, list[str]]]:
    """A prompt, three times, each in other blocks; at last from the prefix cache."""
    found = []
    for time in range(3):
        computed(engine, f"other{time}", time)
        found.append(computed(engine, f"r{time}", number))
        engine.forget_prefixes()
    computed(engine, "before", number)
    return [*found, computed(engine, "cached", number)]


def agree(one: dict[str, list[str]], other: dict[str, list[str]]) -> bool:
    """The same digests, except of blocks that a window has left behind on one side alone."""
    assert one.keys() == other.keys()
    pairs = [pair for form in one for pair in zip(one[form], other[form], strict=True) if NONE not in pair]
    assert pairs
    return all(ours == theirs for ours, theirs in pairs)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("number", [SHORT, LONG])
def test_two_engines(standing: Engines, spec: Spec, number: int) -> None:
    """Two engines that computed the same prompt have the same digests, whatever blocks they took, and cached or not."""
    one = standing.play(computed, spec, name="r", number=number)
    other = standing.play(elsewhere, spec, number=number)
    assert (one.kind, other.kind) == ("held", "held"), (one, other)
    assert all(agree(one.facts, again) for again in other.facts)
    groups = list(one.facts.values())
    assert len(groups) == (2 if spec.model == "hybrid" else 1)
    for digests in groups:
        known = [digest for digest in digests if digest != NONE]
        assert len(digests) == -(-len(prompt(number)) // BLOCK)
        assert len(known) == len(set(known))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_another_prompt(standing: Engines, spec: Spec) -> None:
    """No block of another prompt has a digest of this one."""
    verdicts = [standing.play(computed, spec, name="r", number=number) for number in (SHORT, SHORT + 1)]
    assert {verdict.kind for verdict in verdicts} == {"held"}, verdicts
    one, other = ({digest for group in verdict.facts.values() for digest in group} for verdict in verdicts)
    assert one & other <= {NONE}


def test_damage_in_an_engine(standing: Engines) -> None:
    """A prompt's digests stay while it is decoded, and the block that is damaged differs, and no other."""
    verdict = standing.play(damaged, SPECS["llama"])
    assert verdict.kind == "held", verdict
    assert list(verdict.facts.values()) == [[], [1], [], [2]], verdict.facts


def first_heads(worker: Any) -> list[int]:
    caches = worker.vllm_config.compilation_config.static_forward_context
    kv_caches = {name: layer.kv_cache for name, layer in caches.items()}
    (layouts,) = group_layouts(kv_caches, worker.model_runner.kv_cache_config, worker.vllm_config)
    return [layout.first_head for layout in layouts.values()]


def on_ranks(engine: Engine, number: int) -> Any:
    return engine.core.model_executor.collective_rpc(first_heads), elsewhere(engine, number)


def test_two_ranks(standing: Engines) -> None:
    """Ranks that split the heads sum up to the same digests each time, and have one form with a lone rank."""
    alone = standing.play(computed, SPECS["llama"], name="r", number=SHORT)
    verdict = standing.play(on_ranks, Spec(which="plain", ranks=2), number=SHORT, seconds=120.0, fresh=True)
    assert (alone.kind, verdict.kind) == ("held", "held"), (alone, verdict)
    heads, (first, *others) = verdict.facts
    assert heads == [[0, 0], [1, 1]]
    assert all(agree(first, other) for other in others)
    assert first.keys() == alone.facts.keys()
