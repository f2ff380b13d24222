"""Random calls of ``generate``, each of which must say what plain ``generate`` says."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from soak_faults import INJECTED, Fault
from soak_models import LONGEST_TEXT, NUM_PROMPTS, PAD, SEEDS, SETTINGS, Pair, Settings
from transformers.generation.streamers import BaseStreamer

from hf_specdec import Drafter, RowStep, RowStoppingCriteria, RowStreamer
from hf_specdec.drafters import Gemma4Drafter, MLPDrafter, MTPDrafter, NGramDrafter, VerifiedStep
from hf_specdec.registry import mtp_network

# Of the random models' vocabularies; other tokens are no drafts anybody would propose.
_FIRST, _LAST = 3, 63


class KnowingDrafter(Drafter):
    """A user's own drafter: knows what each row will say, and is wrong at every third token."""

    def __init__(self, answers: Sequence[Sequence[int]]):
        self._answers = [list(answer) for answer in answers]
        self._rows: list[int] = []
        self._emitted: list[int] = []

    @property
    def max_draft_tokens(self) -> int:
        """Any number would do."""
        return 5

    def check(self, target: Any) -> None:
        """It fits everything."""

    def start(self, target: Any, prompt: Any = None, num_draft_tokens: Any = None) -> None:
        """Begin with all rows."""
        self._rows = list(range(len(self._answers)))
        self._emitted = [0] * len(self._answers)

    def observe(self, step: VerifiedStep) -> None:
        """Count."""
        for row, count in zip(self._rows, step.host_num_accepted, strict=True):
            self._emitted[row] += count + 1

    def propose(self, token_ids: Any, num_draft_tokens: int, pick: Any = None) -> torch.Tensor:
        """The next tokens, every third one wrong."""
        drafts = []
        for row in self._rows:
            start = self._emitted[row]
            known = self._answers[row][start : start + num_draft_tokens]
            known += [_FIRST] * (num_draft_tokens - len(known))
            drafts.append(
                [
                    _FIRST + (token + 1) % (_LAST - _FIRST) if (start + i) % 3 == 2 else token
                    for i, token in enumerate(known)
                ]
            )
        return torch.tensor(drafts)

    def keep_rows(self, order: Sequence[int]) -> None:
        """Drop rows."""
        self._rows = [self._rows[i] for i in order]


class _Texts(RowStreamer):
    """Keeps what each row was streamed."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows: list[list[int]] = [[] for _ in range(rows)]

    def put_rows(self, steps: list[RowStep]) -> None:
        for step in steps:
            self.rows[step.row] += step.token_ids


class _Text(BaseStreamer):
    """The same of one row, behind its prompt."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[]]
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.rows[0] += value.tolist()
        self._has_prompt = True

    def end(self) -> None:
        pass


class _Limits(RowStoppingCriteria):
    """Rows of different lengths."""

    def __init__(self, limits: Sequence[int]):
        self._limits = limits
        self._seen = [0] * len(limits)

    def first_stop(self, row: int, token_ids: Sequence[int]) -> int | None:
        left = self._limits[row] - self._seen[row]
        self._seen[row] += len(token_ids)
        return left if len(token_ids) >= left else None


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        unequal: rows that differ from plain generation.
        injected: exceptions that were thrown in and came out.
        problems: anything else that is wrong.
        tokens: emitted.
        drafts, accepted: drafted and accepted tokens.
    """

    unequal: int = 0
    injected: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, other: Outcome) -> None:
        """Sum up."""
        for name in ("unequal", "injected", "tokens", "drafts", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems


@dataclass
class Call:
    """One call, and what it must say.

    Attributes:
        name: what drafts, for reports.
        pair: the target and its texts.
        arguments: of ``generate``.
        expected: new tokens of each row; ``None`` where only the distribution is the target's.
        draws: how many row seeds the call takes from torch's generator.
    """

    name: str
    pair: Pair
    arguments: dict[str, Any]
    expected: list[list[int]] | None
    draws: int = 0

    def run(self, fault: Fault | None = None) -> Outcome:
        """Make the call, with an exception thrown in if there is a ``fault``."""
        outcome, target = Outcome(), self.pair.target
        generator = torch.get_rng_state()
        made = dict(self.arguments)
        rows = len(made["input_ids"])
        streams = made.pop("streams", False)
        if streams:
            made["streamer"] = _Text() if rows == 1 else _Texts(rows)
        if (limits := made.pop("limits", None)) is not None:
            made["stopping_criteria"] = [_Limits(limits)]
        if fault is None:
            self._judge(outcome, target.generate(**made), made.get("streamer"))
        else:
            try:
                with fault.installed(target, made) as changed:
                    output = target.generate(**changed)
            except INJECTED as error:
                outcome.injected = 1
                if error is not fault.raised:
                    outcome.problems.append(f"{fault}: another one came out: {error!r}")
                # Its frames hold the call's tensors, and one of them the fault.
                fault.raised = None
            else:
                if fault.raised is not None:
                    outcome.problems.append(f"{fault}: it was swallowed")
                self._judge(outcome, output, None)
        self._check_generator(outcome, generator)
        return outcome

    def _judge(self, outcome: Outcome, output: Any, streamer: Any) -> None:
        """Compare an output with what plain ``generate`` says."""
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        width = self.arguments["input_ids"].shape[1]
        new = sequences[:, width:].tolist()
        if (stats := getattr(output, "speculation", None)) is not None:
            outcome.drafts += stats.num_draft_tokens
            outcome.accepted += stats.num_accepted_tokens
        if not torch.equal(sequences[:, :width], self.arguments["input_ids"]):
            outcome.problems.append("the prompt came back changed")
        if self.expected is None:
            outcome.tokens += sum(map(len, new))
            return
        longest = max(map(len, self.expected))
        padded = [row + [PAD] * (longest - len(row)) for row in self.expected]
        outcome.tokens += sum(map(len, self.expected))
        # Of a call that was cut short nothing is missing, so lengths count as well.
        outcome.unequal += sum(a != b for a, b in zip(new, padded, strict=True))
        if streamer is not None:
            outcome.unequal += sum(
                a != b for a, b in zip(streamer.rows, self.expected, strict=True)
            )

    def _check_generator(self, outcome: Outcome, before: torch.Tensor) -> None:
        """torch's generator has moved by the row seeds, if it was asked for them, and no further.

        One that failed may have got as far or not.
        """
        after = torch.get_rng_state()
        if torch.equal(after, before):
            if self.draws and not outcome.injected:
                outcome.problems.append("no row seeds were drawn from torch's generator")
            return
        torch.set_rng_state(before)
        if self.draws:
            torch.randint(2**62, (self.draws,))
        if not torch.equal(after, torch.get_rng_state()):
            outcome.problems.append("torch's generator has moved")
        torch.set_rng_state(after)


def drafters_of(pair: Pair) -> dict[str, Callable[[], dict[str, Any]]]:
    """The ways to draft for a target, as arguments of ``generate``."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "n-gram": lambda: {"assistant_model": NGramDrafter()}
    }
    if pair.speculator is not None:
        network = pair.speculator
        ways["MLP"] = lambda: {"assistant_model": network}
        ways["MLP, a drafter"] = lambda: {"assistant_model": MLPDrafter(network)}
        ways["MLP and lookup"] = lambda: {
            "assistant_model": network,
            "prompt_lookup_num_tokens": 4,
        }
        if pair.name != "lfm2":
            ways["MLP, trees"] = lambda: {"assistant_model": network, "num_tree_nodes": 6}
    if pair.assistant is not None:
        assistant = pair.assistant
        ways["Gemma 4"] = lambda: {"assistant_model": assistant}
        ways["Gemma 4, a drafter"] = lambda: {"assistant_model": Gemma4Drafter(assistant)}
    if pair.name == "mimo":
        ways["MTP"] = lambda: {"use_mtp": True}
        ways["MTP, a drafter"] = lambda: {"assistant_model": MTPDrafter(mtp_network(pair.target))}
    return ways


def random_call(
    choice: random.Random, pair: Pair, rejection: bool = False, simple: bool = False
) -> Call:
    """A call of random size, settings and drafter.

    Args:
        choice: decides.
        pair: the target.
        rejection: verify by the classical rule, which gives a text of its own.
        simple: without a streamer and without limits of the rows' own.
    """
    rows = choice.choice((1, 1, 2, 3, 5, 8))
    prompts = [choice.randrange(NUM_PROMPTS) for _ in range(rows)]
    length = choice.choice((1, 2, 7, 16, LONGEST_TEXT))
    settings = Settings(0.9, 8) if rejection else choice.choice(SETTINGS)
    if settings.repetition_penalty != 1:
        # In a batch it is about the padding as well, with and without a drafter.
        prompts = prompts[:1]
    rows, seeds = len(prompts), [choice.choice(SEEDS) for _ in prompts]
    limits = None
    if choice.random() < 0.2 and not simple:
        limits = [choice.randint(1, length) for _ in prompts]
    lengths = limits or [length] * rows
    expected = [
        pair.text(prompt, count, settings, seed)
        for prompt, count, seed in zip(prompts, lengths, seeds, strict=True)
    ]
    ways = drafters_of(pair)
    if not rejection:
        ways["the user's own"] = lambda: {"assistant_model": KnowingDrafter(expected)}
    name = choice.choice(sorted(ways))
    arguments: dict[str, Any] = {
        **pair.batch(prompts),
        **ways[name](),
        **settings.arguments(),
        "max_new_tokens": length,
    }
    k = choice.choice((None, None, 0, 1, 2, 3, "auto"))
    # Rejection's text depends on K, and "auto" on the clock.
    if k is not None and not (rejection and k == "auto"):
        arguments["num_assistant_tokens"] = k
    if settings.temperature:
        arguments["row_seeds"] = seeds
    if rejection:
        arguments["verification"] = "rejection"
    if limits is not None:
        arguments["limits"] = limits
    if choice.random() < 0.2 and not simple:
        arguments["streams"] = True
    arguments |= _outputs(choice)
    return Call(name, pair, arguments, None if rejection else expected)


def _outputs(choice: random.Random) -> dict[str, Any]:
    """What else a call is asked for."""
    if choice.random() < 0.4:
        return {}
    wanted: dict[str, Any] = {"return_dict_in_generate": True}
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        if choice.random() < 0.15:
            wanted[name] = True
    return wanted


@contextlib.contextmanager
def random_mode(choice: random.Random) -> Any:
    """As a caller may have it: in inference mode, without gradients, or neither."""
    mode = choice.choice((torch.inference_mode, torch.no_grad, contextlib.nullcontext))
    with mode():
        yield
