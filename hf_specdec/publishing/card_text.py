"""The body of a model card, section by section. A section without facts is left out."""

from __future__ import annotations

from typing import Any

from hf_specdec.publishing.card_examples import examples
from hf_specdec.publishing.facts import CardFacts
from hf_specdec.publishing.measurements import CURVE_FILE, RESULT_FILE
from hf_specdec.publishing.speed import Speed


def card_body(facts: CardFacts) -> str:
    """Markdown, ending with a newline."""
    sections = [
        _title(facts),
        _summary(facts),
        *examples(facts),
        _acceptance(facts.result),
        _speed(facts.speed),
        _training(facts.result, facts.has_curve),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _title(facts: CardFacts) -> str:
    name = facts.repo_id.rpartition("/")[2]
    target = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    if facts.model_type == "mimo":
        source = f" {target}" if facts.base_model else " the model it was made of"
        return (
            f"# {name}\n\nA model with multi-token-prediction layers, with which it drafts for "
            f"itself. What it says is what{source} says, token for token in exact arithmetic: the "
            "layers only draft, and every draft is checked."
        )
    heads = facts.config["n_predict"]
    whose = f" for {target}" if facts.base_model else ""
    return (
        f"# {name}\n\nAn MLP speculator{whose}. From the target's last hidden state and last token "
        f"it drafts up to {heads} tokens, the target checks them in one forward pass, and the text "
        "is what the target alone would have written (in float32 token for token; lower "
        "precision can decide a near-tie either way, as batching does)."
    )


def _summary(facts: CardFacts) -> str:
    config = facts.config
    rows: list[tuple[str, Any]] = []
    if facts.model_type == "mlp_speculator":
        rows += [("heads", config["n_predict"]), ("state", config.get("inner_dim") or None)]
        if config.get("draft_vocab_size"):
            rows.append(("ids it can draft", f"{config['draft_vocab_size']:,}"))
        if config.get("share_target_weights"):
            rows.append(("token tables", "the target's"))
        rows += [("heads share weights", "yes")] if config.get("tie_weights") else []
    else:
        rows.append(("MTP layers", config.get("num_nextn_predict_layers")))
        if ids := config.get("mtp_draft_token_ids"):
            rows.append(("ids they can draft", f"{len(ids):,}"))
    if facts.num_parameters:
        rows.append(("parameters", f"{facts.num_parameters:,}"))
    rows.append(("dtype", config.get("dtype") or config.get("torch_dtype")))
    return _table(["", ""], [[name, value] for name, value in rows if value is not None])


def _acceptance(result: dict[str, Any] | None) -> str:
    measured = (result or {}).get("acceptance")
    if not measured or not measured.get("per_position"):
        return ""
    rates = measured["per_position"]
    header = ["draft position", *(str(i) for i in range(1, len(rates) + 1)), "mean length"]
    row = ["accepted this far", *(f"{rate:.1%}" for rate in rates)]
    row.append(f"{measured['mean_acceptance_length']:.2f}")
    kind = "the target's own greedy text" if measured.get("greedy_text") else "held-out text"
    about = f"Greedy drafts against {kind}, on documents that training did not see"
    if measured.get("num_positions"):
        about += f" ({measured['num_positions']:,} drafts)"
    if hardware := _hardware((result or {}).get("hardware")):
        about += f". {hardware}"
    return f"## Acceptance\n\n{_table(header, [row])}\n\n{about}."


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return ""
    header = ["batch", "K", "plain", "speculative", "speed-up", "mean length", "per position"]
    rows: list[list[Any]] = []
    for row in speed.rows:
        median, least, most = row.speedup
        rows.append(
            [
                row.batch,
                row.k,
                f"{row.plain:.1f} tok/s",
                f"{row.speculative:.1f} tok/s",
                f"{median:.2f}x ({least:.2f}-{most:.2f})",
                f"{row.mean_acceptance_length:.2f}",
                " ".join(f"{rate:.2f}" for rate in row.per_position),
            ]
        )
    if any(row.prompt_set for row in speed.rows):
        header = ["prompts", *header]
        rows = [[r.prompt_set or "", *cells] for r, cells in zip(speed.rows, rows, strict=True)]
    about = f"Medians, greedy, paired in one run: {speed.machine}."
    return f"## Speed\n\n{_table(header, rows)}\n\n{about}"


def _training(result: dict[str, Any] | None, has_curve: bool) -> str:
    if result is None:
        return ""
    rows: list[list[Any]] = []
    training, data = result.get("training", {}), result.get("data", {})
    if result.get("preset"):
        rows.append(["preset", result["preset"]])
    if description := data.get("description"):
        rows.append(["data", description])
    elif files := data.get("files"):
        rows.append(["files", ", ".join(files)])
    for corpus in data.get("corpora", ()):
        stage = str(corpus.get("stage", "")).replace("_", " ")
        count = f"{corpus['tokens']:,} tokens"
        if corpus.get("documents"):
            count += f" in {corpus['documents']:,} documents"
        rows.append([stage, count])
    if training.get("tokens_trained"):
        steps = f" in {training['steps']:,} steps" if training.get("steps") else ""
        rows.append(["trained on", f"{training['tokens_trained']:,} tokens{steps}"])
    if total := training.get("seconds", {}).get("total"):
        rows.append(["time", _count(max(round(total / 60), 1), "minute")])
    if training.get("continued_from"):
        rows.append(["continued from", training["continued_from"]])
    for name in ("objective", "learning_rate", "head_decay", "distill_top_k", "num_sampled"):
        # 0 and None turn a thing off.
        if value := result.get("settings", {}).get(name):
            rows.append([name.replace("_", " "), value])
    if hardware := _hardware(result.get("hardware")):
        rows.append(["hardware", hardware])
    if not rows:
        return ""
    about = f"With `hf-specdec train`; all settings are in `{RESULT_FILE.as_posix()}`."
    if has_curve:
        about += f"\n\n![Loss and acceptance over training]({CURVE_FILE.as_posix()})"
    return f"## Training\n\n{_table(['', ''], rows)}\n\n{about}"


def _hardware(hardware: dict[str, Any] | None) -> str:
    if not hardware:
        return ""
    name = hardware.get("name") or hardware.get("device")
    parts = [str(name)] if name else []
    if hardware.get("processes", 1) > 1:
        parts.append(_count(hardware["processes"], "processes"))
    if hardware.get("device") == "cpu" and hardware.get("threads"):
        parts.append(_count(hardware["threads"], "thread"))
    for package in ("torch", "transformers", "hf_specdec"):
        if hardware.get(package):
            parts.append(f"{package} {hardware[package]}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1 and not what.endswith("s"))


def _table(header: list[Any], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    # A bar would end its cell.
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
