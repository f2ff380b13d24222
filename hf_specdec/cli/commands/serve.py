"""`hf-specdec serve`: options and checks; the work is in `hf_specdec.cli.serve`."""

import json
from typing import Annotated, Any, Literal

import typer

from hf_specdec.cli.options import (
    Compile,
    Device,
    Dtype,
    Lookup,
    PackWeights,
    SpecMethod,
    SpecModel,
    SpecTokens,
    SpeculativeConfigJson,
    Target,
    TreeNodes,
    pair_settings,
)
from hf_specdec.cli.spread import DeviceMap, MaxMemory, OffloadFolder, spread


def _option(what: str, metavar: str, panel: str | None = None, least: float | None = None) -> Any:
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel, min=least)


_BATCHING = "Batching"
Host = Annotated[str, _option("Address to listen at.", "HOST")]
Port = Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0: a free one.")]
ServedName = Annotated[
    str | None, _option("What clients call the model (default: TARGET).", "NAME")
]
MaxModelLen = Annotated[
    int | None,
    _option("Tokens of prompt and answer (default: the model's positions).", "N", None, 2),
]
DefaultMaxTokens = Annotated[int, _option("New tokens if a request names no limit.", "N", None, 1)]
TemplateKwargs = Annotated[
    str | None,
    _option("""Defaults for the chat template: '{"enable_thinking": false}'.""", "JSON"),
]
ShutdownTimeout = Annotated[float, _option("Time for running requests when stopped.", "S", None, 0)]
MetricsPrefix = Annotated[
    str, _option('Of the names in /metrics; "vllm" fits its dashboards.', "NAME")
]
EnableCors = Annotated[
    bool, typer.Option("--enable-cors", help="Let web pages of other origins call it.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    _option("debug, info, warning or error.", "LEVEL"),
]
MaxBatchSize = Annotated[int, _option("Most texts of a batch.", "N", _BATCHING, 1)]
BatchWait = Annotated[
    float, _option("How long a text waits for others to share its batch.", "MS", _BATCHING, 0)
]
MaxWaiting = Annotated[int, _option("Most texts in the queue.", "N", _BATCHING, 1)]
ConcurrentBatches = Annotated[
    int,
    _option(
        "Batches that run at once; more: a text waits less, all run slower.", "N", _BATCHING, 1
    ),
]


def serve(
    target: Target,
    speculative_config: SpeculativeConfigJson = None,
    spec_method: SpecMethod = None,
    spec_model: SpecModel = None,
    spec_tokens: SpecTokens = None,
    tree_nodes: TreeNodes = None,
    lookup: Lookup = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    pack_weights: PackWeights = False,
    compiles: Compile = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    max_model_len: MaxModelLen = None,
    default_max_tokens: DefaultMaxTokens = 1024,
    chat_template_kwargs: TemplateKwargs = None,
    max_batch_size: MaxBatchSize = 16,
    batch_wait_ms: BatchWait = 5.0,
    max_waiting: MaxWaiting = 1024,
    concurrent_batches: ConcurrentBatches = 1,
    shutdown_timeout: ShutdownTimeout = 60.0,
    metrics_prefix: MetricsPrefix = "hf_specdec",
    enable_cors: EnableCors = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model with OpenAI's API; every request speculates.

    \b
    Examples:
      hf-specdec serve demo
      hf-specdec serve TARGET --speculative-config '{"model": "DRAFTER"}' --port 9000
      hf-specdec serve TARGET --spec-method mtp --spec-tokens 1 --max-batch-size 8
    """
    pair = pair_settings(
        target,
        speculative_config,
        spec_method,
        spec_model,
        spec_tokens,
        dtype,
        device,
        pack_weights,
        compiles,
        tree_nodes,
        lookup,
        spread(device_map, max_memory, offload_folder, device, compiles, pack_weights),
    )
    template_kwargs = _json_object(chat_template_kwargs)
    from hf_specdec.cli.serve import ServeSettings, run_serve

    run_serve(
        ServeSettings(
            pair=pair,
            host=host,
            port=port,
            served_model_name=served_model_name or target,
            max_model_len=max_model_len,
            default_max_tokens=default_max_tokens,
            max_batch_size=max_batch_size,
            batch_wait=batch_wait_ms / 1000,
            max_waiting=max_waiting,
            concurrent_batches=concurrent_batches,
            chat_template_kwargs=template_kwargs,
            shutdown_timeout=shutdown_timeout,
            metrics_prefix=metrics_prefix,
            enable_cors=enable_cors,
            log_level=log_level,
        )
    )


def _json_object(text: str | None) -> dict[str, Any]:
    """The value of ``--chat-template-kwargs``."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise typer.BadParameter(
            f"{text!r} is not JSON ({error})", param_hint="--chat-template-kwargs"
        ) from None
    if not isinstance(value, dict):
        raise typer.BadParameter(
            f"{text} must be a JSON object", param_hint="--chat-template-kwargs"
        )
    return value
