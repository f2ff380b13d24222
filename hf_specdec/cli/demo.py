"""`hf-specdec demo`: a few prompts with and without a drafter, side by side.

Both runs go through `target.generate`; the only difference is `assistant_model=`. They alternate
prompt by prompt after a warm-up of both, so that a machine that slows down slows both. Nothing
moves on the screen during a measured run: a spinner's thread would cost the run time.
"""

import platform
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console

from hf_specdec._version import __version__
from hf_specdec.agreement import Difference, explain_difference
from hf_specdec.cli.demo_pair import DemoPair, demo_dtype, load_demo_pair
from hf_specdec.cli.options import DtypeName
from hf_specdec.cli.report import PromptResult, Run, acceptance_table, throughput_table
from hf_specdec.cli.streaming import ACCEPTED_STYLE, BlockStreamer
from hf_specdec.modeling.placement import input_device

DEFAULT_PROMPTS = (
    "Why is the sky blue? Explain it to a ten-year-old.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Give me five tips for sleeping better.",
    "Write a short email asking a colleague to move our meeting to Thursday.",
    "Tell me a short story about a lighthouse keeper and a lost seagull.",
)
SAMPLING_TEMPERATURE = 0.7
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class DemoSettings:
    """What the user chose; the fields are the command's options."""

    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    max_new_tokens: int = 160
    dtype: DtypeName = "auto"
    device: str = "auto"
    threads: int | None = None
    num_assistant_tokens: int | None = None
    tree_nodes: int | None = None
    sample: bool = False
    seed: int = 0
    stream: bool = True


def run_demo(settings: DemoSettings, console: Console) -> list[PromptResult]:
    """Loads the demo's models, runs every prompt both ways, and prints the comparison.

    Raises:
        DemoPairUnavailableError: A model of the pair is not installed.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = _choose_device(settings.device)
    with console.status("Loading target and drafter (dequantizing takes some seconds) ..."):
        pair = load_demo_pair(demo_dtype(settings.dtype, device), device)
    with console.status("Warming up ..."):
        _warm_up(pair, settings)

    if settings.stream:
        console.print(f"[{ACCEPTED_STYLE}]drafted and accepted[/], chosen by the target\n")
    results = []
    for prompt in settings.prompts:
        console.print(f"> {prompt}", style="bold", markup=False, highlight=False)
        result = _compare(pair, prompt, settings, console)
        _print_result(result, console)
        results.append(result)

    console.print(throughput_table(results, compare_texts=not settings.sample))
    console.print(acceptance_table(results))
    console.print(_environment(settings, device), style="dim", highlight=False)
    return results


def generation_arguments(settings: DemoSettings) -> dict[str, Any]:
    """Returns the arguments that the plain and the speculative call of `generate` share."""
    arguments: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.sample,
        "return_dict_in_generate": True,
    }
    if settings.sample:
        arguments["temperature"] = SAMPLING_TEMPERATURE
    return arguments


def speculation_arguments(pair: DemoPair, settings: DemoSettings) -> dict[str, Any]:
    """Returns the arguments that turn the plain call of `generate` into the speculative one."""
    arguments: dict[str, Any] = {"assistant_model": pair.drafter}
    if settings.num_assistant_tokens is not None:
        arguments["num_assistant_tokens"] = settings.num_assistant_tokens
    if settings.tree_nodes is not None:
        arguments["num_tree_nodes"] = settings.tree_nodes
    return arguments


def _compare(pair: DemoPair, prompt: str, settings: DemoSettings, console: Console) -> PromptResult:
    inputs = _chat_inputs(pair, prompt)
    prompt_length = inputs["input_ids"].shape[1]
    shared = generation_arguments(settings)
    streamer = BlockStreamer(pair.tokenizer, console) if settings.stream else None

    torch.manual_seed(settings.seed)
    output, seconds = _timed(
        pair, inputs, **shared, **speculation_arguments(pair, settings), streamer=streamer
    )
    speculative_ids = output.sequences[0, prompt_length:].tolist()
    # Printing is left out: only one of the two runs is shown.
    speculative = Run(len(speculative_ids), seconds - (streamer.seconds if streamer else 0.0))

    torch.manual_seed(settings.seed)
    plain_output, seconds = _timed(pair, inputs, **shared)
    plain_ids = plain_output.sequences[0, prompt_length:].tolist()

    difference = None
    if not settings.sample:
        difference = explain_difference(
            pair.target, inputs["input_ids"], plain_ids, speculative_ids
        )
    agreement, reason = ("sampled", "") if settings.sample else describe_agreement(difference)
    return PromptResult(
        prompt=prompt,
        plain=Run(len(plain_ids), seconds),
        speculative=speculative,
        stats=output.speculation,
        agreement=agreement,
        identical=not settings.sample and difference is None,
        reason=reason,
    )


def describe_agreement(difference: Difference | None) -> tuple[str, str]:
    """Says how far two texts agree (short, with rich markup) and why they part (a sentence)."""
    if difference is None:
        return "[green]yes[/]", ""
    gap = f"gap {difference.gap:.3g}, rounding {difference.rounding:.2g}"
    if difference.near_tie:
        why = f"a near-tie ({gap} between the target's two best tokens): either is the target's own"
        colour = "yellow"
    else:
        why = f"not a near-tie ({gap} between the target's two best tokens): this is an error"
        colour = "red"
    return (
        f"[{colour}]{difference.position} tokens[/]",
        f"The texts are identical up to token {difference.position}, then {why}.",
    )


def _print_result(result: PromptResult, console: Console) -> None:
    speeds = (
        f"{result.speculative.tokens_per_second:.1f} tokens/s; "
        f"without the drafter {result.plain.tokens_per_second:.1f}"
    )
    lines = f"{speeds}\n{result.reason}\n" if result.reason else f"{speeds}\n"
    console.print(lines, style="dim", highlight=False, markup=False)


def _timed(pair: DemoPair, inputs: dict[str, torch.Tensor], **arguments: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    output = pair.target.generate(**inputs, **arguments)  # type: ignore[operator]
    if input_device(pair.target).type == "cuda":
        torch.cuda.synchronize()
    return output, time.perf_counter() - start


def _warm_up(pair: DemoPair, settings: DemoSettings) -> None:
    inputs = _chat_inputs(pair, settings.prompts[0])
    shared = generation_arguments(settings) | {"max_new_tokens": WARM_UP_TOKENS}
    _timed(pair, inputs, **shared)
    _timed(pair, inputs, **shared, **speculation_arguments(pair, settings))


def _chat_inputs(pair: DemoPair, prompt: str) -> dict[str, torch.Tensor]:
    inputs: Any = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    device = input_device(pair.target)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _environment(settings: DemoSettings, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    how = (
        f"sampled at temperature {SAMPLING_TEMPERATURE}, seed {settings.seed}: plain generate "
        "draws other random numbers, so the two texts are different samples"
        if settings.sample
        else "greedy"
    )
    dtype = str(demo_dtype(settings.dtype, device)).removeprefix("torch.")
    if settings.dtype == "auto" and dtype == "float32":
        dtype += " (this processor has no instructions for bfloat16)"
    return (
        f"SmolLM2-135M-Instruct, {dtype}, {device.type} ({where}), "
        f"{torch.get_num_threads()} CPU threads; {how}; up to {settings.max_new_tokens} tokens a "
        "prompt, batch 1, time spent printing left out.\n"
        f"hf-specdec {__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}"
    )
