"""What a soak does: single calls, chats, attached targets, pipelines, threads, and so on."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from soak_calls import Call, Outcome, drafters_of, random_call, random_mode
from soak_faults import Fault, refuse
from soak_models import NUM_PROMPTS, TARGETS, Pair, Settings, make_pair
from transformers import CompileConfig, DynamicCache, pipeline

import hf_specdec

# What says how to draft.
_DRAFTERS = ("assistant_model", "use_mtp", "num_tree_nodes", "prompt_lookup_num_tokens")


@dataclass
class World:
    """What all calls share.

    Attributes:
        pairs: targets with what drafts for them.
        tokenizer: of all.
    """

    pairs: list[Pair]
    tokenizer: Any

    def models(self) -> list[Any]:
        """All networks."""
        found = [[p.target, p.plain, p.speculator, p.assistant] for p in self.pairs]
        return [model for models in found for model in models if model is not None]


def one_call(choice: random.Random, world: World) -> Outcome:
    """A single call."""
    with random_mode(choice):
        return random_call(choice, choice.choice(world.pairs)).run()


def failing_call(choice: random.Random, world: World) -> Outcome:
    """A call into which an exception is thrown, and the same once more without."""
    call = random_call(choice, choice.choice(world.pairs), simple=True)
    outcome = call.run(Fault(choice))
    outcome.add(call.run())
    return outcome


def refused_call(choice: random.Random, world: World) -> Outcome:
    """A bad argument, and the same call without it."""
    call = random_call(choice, choice.choice(world.pairs))
    outcome = Outcome()
    arguments = {k: v for k, v in call.arguments.items() if k not in ("streams", "limits")}
    if "assistant_model" in arguments:
        problem = refuse(choice, call.pair.target, arguments)
        outcome.problems += [problem] if problem else []
    outcome.add(call.run())
    return outcome


def rejection(choice: random.Random, world: World) -> Outcome:
    """The classical rule: one text for the same seeds, and the greedy one where only it is left."""
    call = random_call(choice, choice.choice(world.pairs), rejection=True, simple=True)
    outcome = call.run()
    arguments = dict(call.arguments)
    first, second = (_sequences(call.pair.target.generate(**arguments)) for _ in range(2))
    outcome.unequal += int((first != second).any(dim=1).sum())
    only = _sequences(call.pair.target.generate(**{**arguments, "top_k": 1}))
    greedy = call.pair.plain.generate(
        **{k: arguments[k] for k in ("input_ids", "attention_mask", "max_new_tokens")},
        do_sample=False,
    )
    outcome.unequal += int((only != greedy).any(dim=1).sum())
    return outcome


def drawn_seeds(choice: random.Random, world: World) -> Outcome:
    """Sampling under ``torch.manual_seed``: the seeds, and so the texts, don't depend on K."""
    pair = choice.choice(world.pairs)
    rows = choice.choice((1, 2))
    prompts = [choice.randrange(NUM_PROMPTS) for _ in range(rows)]
    settings, seed, length = Settings(1.1, 12), choice.randrange(2**31), 8
    torch.manual_seed(seed)
    drawn = torch.randint(2**62, (rows,)).tolist()
    texts = [
        pair.say(pair.prompts[p], length, settings, s) for p, s in zip(prompts, drawn, strict=True)
    ]
    ways = drafters_of(pair)
    name = choice.choice(sorted(ways))
    arguments = {**pair.batch(prompts), **ways[name](), **settings.arguments()}
    if choice.random() < 0.5:
        arguments["num_assistant_tokens"] = choice.randrange(4)
    torch.manual_seed(seed)
    wanted = {**arguments, "max_new_tokens": length}
    return Call(name, pair, wanted, texts, draws=rows).run()


def chat(choice: random.Random, world: World) -> Outcome:
    """Turns that pass their cache on, plain ones in between; one of them may fail."""
    pair = choice.choice(world.pairs)
    ids, cache = list(choice.choice(pair.prompts)), DynamicCache(config=pair.target.config)
    outcome = Outcome()
    for _ in range(3):
        length = choice.randint(2, 9)
        expected = pair.say(ids, length, Settings())
        drafter = choice.choice(list(drafters_of(pair).values()))()
        tensor = torch.tensor([ids])
        arguments = {
            "input_ids": tensor,
            "attention_mask": torch.ones_like(tensor),
            "max_new_tokens": length,
            "cache": cache,
            "return_dict_in_generate": True,
            "do_sample": False,
            **({} if choice.random() < 0.2 else drafter),
        }
        call = Call("a chat", pair, arguments, [expected])
        if choice.random() < 0.15:
            outcome.add(call.run(Fault(choice)))
            # What a failed call leaves in a cache nobody promises.
            return outcome
        outcome.add(call.run())
        ids += expected + [choice.randrange(3, 64) for _ in range(choice.randint(1, 6))]
    return outcome


def attached(choice: random.Random, world: World) -> Outcome:
    """Attach, call as if nothing were, and detach."""
    pair = choice.choice(world.pairs)
    configs: list[dict[str, Any]] = [{"method": "ngram", "num_speculative_tokens": 4}]
    if (network := pair.speculator or pair.assistant) is not None:
        configs.append({"model": network, "num_speculative_tokens": 2})
    if pair.name == "mimo":
        configs.append({"method": "mtp"})
    hf_specdec.attach(pair.target, choice.choice(configs))
    outcome = Outcome()
    try:
        for _ in range(2):
            call = random_call(choice, pair)
            for name in (
                "assistant_model",
                "use_mtp",
                "num_tree_nodes",
                "prompt_lookup_num_tokens",
            ):
                call.arguments.pop(name, None)
            call.arguments["num_assistant_tokens"] = choice.choice((0, 1, 2))
            outcome.add(call.run(Fault(choice) if choice.random() < 0.3 else None))
        counted = hf_specdec.speculation_totals(pair.target).snapshot().num_draft_tokens
        if counted < outcome.drafts:
            outcome.problems.append(f"{outcome.drafts} drafts, and {counted} of them counted")
    finally:
        hf_specdec.detach(pair.target)
    return outcome


def in_pipeline(choice: random.Random, world: World) -> Outcome:
    """A pipeline with an assistant."""
    pair = choice.choice([pair for pair in world.pairs if pair.speculator is not None])
    arguments: dict[str, Any] = {"tokenizer": world.tokenizer, "device": "cpu"}
    pipe = pipeline(
        "text-generation", model=pair.target, assistant_model=pair.speculator, **arguments
    )
    index, length = choice.randrange(NUM_PROMPTS), choice.randint(1, 16)
    text = world.tokenizer.decode(pair.prompts[index], skip_special_tokens=True)
    ids = world.tokenizer(text)["input_ids"]
    if not ids:
        return Outcome()  # special tokens alone: nothing to continue
    said = pipe(text, max_new_tokens=length, do_sample=False, return_tensors=True)
    expected = ids + pair.say(ids, length, Settings())
    return Outcome(unequal=int(said[0]["generated_token_ids"] != expected), tokens=length)


def threads(choice: random.Random, world: World) -> Outcome:
    """Several calls at once, some on the same target."""
    calls = [random_call(choice, choice.choice(world.pairs)) for _ in range(3)]
    outcome, errors = Outcome(), []
    generator = torch.get_rng_state()

    def work(call: Call) -> None:
        try:
            outcome.add(call.run())
        except Exception as error:
            errors.append(f"{call.name}: {error!r}")

    workers = [threading.Thread(target=work, args=(call,)) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    outcome.problems += errors
    if not torch.equal(generator, torch.get_rng_state()):
        outcome.problems.append("torch's generator has moved")
    return outcome


def own_models(choice: random.Random, world: World) -> Outcome:
    """Models that are made, used and dropped: nothing of the library keeps them."""
    pair = make_pair(choice.choice([name for name in TARGETS if name != "lfm2"]))
    outcome = Outcome()
    call = random_call(choice, pair)
    if choice.random() < 0.5:
        hf_specdec.attach(pair.target, {"model": pair.speculator})
    outcome.add(call.run(Fault(choice) if choice.random() < 0.3 else None))
    models = [weakref.ref(pair.target), weakref.ref(pair.speculator)]
    del call, pair
    gc.collect()
    if any(model() is not None for model in models):
        outcome.problems.append("a model outlives its last reference")
    return outcome


def static_shapes(choice: random.Random, world: World) -> Outcome:
    """Buffers of fixed shapes, and steps that are traced for them."""
    pair = world.pairs[0]
    rows, length = choice.choice((1, 2, 4)), choice.choice((4, 12))
    prompts = [choice.randrange(NUM_PROMPTS) for _ in range(rows)]
    arguments = {
        **pair.batch(prompts),
        "assistant_model": pair.speculator,
        "max_new_tokens": length,
        "do_sample": False,
        "cache_implementation": "static",
        "compile_config": CompileConfig(backend="eager"),
    }
    call = Call("static", pair, arguments, [pair.text(p, length, Settings()) for p in prompts])
    outcome = call.run(Fault(choice) if choice.random() < 0.2 else None)
    # Seldom: a few objects of torch's stay for every function it has compiled.
    if choice.random() < 0.05:
        hf_specdec.release_compiled(pair.target)
        hf_specdec.release_compiled(pair.speculator)
    return outcome


def closed_seams(choice: random.Random, world: World) -> Outcome:
    """Disabled, transformers is what it was; enabled again, it speculates again."""
    call = random_call(choice, choice.choice(world.pairs))
    hf_specdec.disable()
    try:
        seams = hf_specdec.integration._originals  # type: ignore[attr-defined]
        outcome = Outcome(problems=["disable() has left wrappers"] if seams else [])
        pair, prompt = call.pair, choice.randrange(NUM_PROMPTS)
        said = pair.target.generate(**pair.batch([prompt]), do_sample=False, max_new_tokens=5)
        expected = list(pair.prompts[prompt]) + pair.text(prompt, 5, Settings())
        outcome.unequal += said[0].tolist() != expected
    finally:
        hf_specdec.enable()
    outcome.add(call.run())
    return outcome


def _sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


# With how often each is done, of a thousand.
KINDS: dict[str, tuple[Callable[[random.Random, World], Outcome], int]] = {
    "a call": (one_call, 420),
    "a failing call": (failing_call, 240),
    "a refused call": (refused_call, 60),
    "rejection": (rejection, 60),
    "seeds of torch": (drawn_seeds, 50),
    "a chat": (chat, 60),
    "attached": (attached, 50),
    "a pipeline": (in_pipeline, 20),
    "threads": (threads, 14),
    "models of its own": (own_models, 10),
    "static shapes": (static_shapes, 10),
    "disable and enable": (closed_seams, 6),
}
