"""`hf-specdec serve`: options and checks; the work is in `hf_specdec.cli.serve`."""

from typing import Annotated, Literal

import typer

from hf_specdec.cli.options import (
    Device,
    Dtype,
    SpecMethod,
    SpecModel,
    SpecTokens,
    SpeculativeConfigJson,
    Target,
    pair_settings,
)

_BATCHING = "Batching"


def serve(
    target: Target,
    speculative_config: SpeculativeConfigJson = None,
    spec_method: SpecMethod = None,
    spec_model: SpecModel = None,
    spec_tokens: SpecTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0: a free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What clients call the model (default: TARGET)."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Tokens of prompt and answer (default: the model's positions)."
        ),
    ] = None,
    default_max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="New tokens if a request names no limit.")
    ] = 1024,
    max_batch_size: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Most texts of a batch.", rich_help_panel=_BATCHING),
    ] = 16,
    batch_wait_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0,
            help="How long a text waits for others to share its batch.",
            rich_help_panel=_BATCHING,
        ),
    ] = 5.0,
    max_waiting: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most texts in the queue.", rich_help_panel=_BATCHING
        ),
    ] = 1024,
    concurrent_batches: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Batches that run at once; more: a text waits less, and all run slower.",
            rich_help_panel=_BATCHING,
        ),
    ] = 1,
    shutdown_timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="Time for running requests when stopped.")
    ] = 60.0,
    metrics_prefix: Annotated[
        str,
        typer.Option(metavar="NAME", help='Of the names in /metrics; "vllm" fits its dashboards.'),
    ] = "hf_specdec",
    enable_cors: Annotated[
        bool, typer.Option("--enable-cors", help="Let web pages of other origins call it.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(metavar="LEVEL", help="debug, info, warning or error."),
    ] = "info",
) -> None:
    """Serve a model with OpenAI's API; every request speculates.

    \b
    Examples:
      hf-specdec serve demo
      hf-specdec serve TARGET --speculative-config '{"model": "DRAFTER"}' --port 9000
      hf-specdec serve TARGET --spec-method mtp --spec-tokens 1 --max-batch-size 8
    """
    settings = pair_settings(
        target, speculative_config, spec_method, spec_model, spec_tokens, dtype, device
    )
    from hf_specdec.cli.serve import ServeSettings, run_serve

    run_serve(
        ServeSettings(
            pair=settings,
            host=host,
            port=port,
            served_model_name=served_model_name or target,
            max_model_len=max_model_len,
            default_max_tokens=default_max_tokens,
            max_batch_size=max_batch_size,
            batch_wait=batch_wait_ms / 1000,
            max_waiting=max_waiting,
            concurrent_batches=concurrent_batches,
            shutdown_timeout=shutdown_timeout,
            metrics_prefix=metrics_prefix,
            enable_cors=enable_cors,
            log_level=log_level,
        )
    )
