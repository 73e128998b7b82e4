"""`meshmuon plan`: options and errors. The forecast is `planner.plan_for`, the words are `plan_report`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmuon.cli.building import build_model, read_mesh, read_overrides
from meshmuon.cli.common import VERBOSE, InputError, choice, closest, one_line_errors
from meshmuon.cli.plan_json import as_json
from meshmuon.cli.plan_report import TrainingStep, estimate_training, report

if TYPE_CHECKING:
    from meshmuon.plan.outlook import Forecast

# One line a paragraph: the help is wrapped to the terminal.
HELP = """Say what an optimizer step will do and cost, on any number of GPUs, without one.

MODEL is pkg.module:build, a function of yours that returns the model. It is called on the meta device, so no memory is needed. Or name a model: --shapes llama-3-8b.

Shows each parameter's route and reason, layouts, batches, memory, bytes moved, the load of each GPU, and the predicted time beside that of the training step. Bytes and operations are counted from the plan Muon makes; times are predictions.

Exit codes: 0 planned, 1 failed, 2 bad input, 130 interrupted.
"""  # noqa: E501


GPUS, NETWORKS, DTYPES = ("h100", "h200", "b200"), ("infiniband", "ethernet"), ("float32", "bfloat16")

_Model = typer.Argument(help="pkg.module:build", metavar="[MODEL]", show_default=False)
_Shapes = typer.Option(
    metavar="NAME",
    help="A well-known model: gpt2, qwen2-0.5b, llama-3-8b, llama-3-70b, mixtral, kimi-k2.",
    show_default=False,
)
_Mesh = typer.Option(
    metavar="AXES",
    help="Axes and sizes, the outermost first: dp=64,tp=8. Known: dp, fsdp, dp_shard, cp (sharded), ddp, hsdp, "
    "dp_replicate (replicated), tp, ep.",
    show_default="one GPU",
)
_Placement = typer.Option(
    metavar="AXIS=RULE",
    help="What an axis does instead: shard0, shard1, replicate, tensor, experts; or by name, as PATTERN:RULE "
    "separated by commas. May be repeated.",
    show_default=False,
)
_Override = typer.Option(
    metavar="PATTERN=ROUTE",
    help="Your last word on parameters: muon, adamw, experts (a stack of matrices) or flatten (a convolution). "
    "May be repeated.",
    show_default=False,
)
_World = typer.Option(min=1, metavar="N", help="Check that the mesh has this many ranks.", show_default=False)
_Gpu = typer.Option(metavar="GPU", help="h100, h200 or b200: what the job runs on.")
_Network = typer.Option(metavar="NET", help="infiniband or ethernet, between nodes of eight.")
_Dtype = typer.Option(metavar="DTYPE", help="float32 or bfloat16, of parameters given by --shapes.")
_Tokens = typer.Option(min=1, metavar="N", help="Tokens of a training step, for each GPU: to compare with.")
_Experts = typer.Option(min=1, metavar="N", help="Experts a token passes through.", show_default="those of --shapes")
_Json = typer.Option("--json", help="The same as JSON, with numbers for each GPU.")


def plan_command(
    model: Annotated[str | None, _Model] = None,
    *,
    shapes: Annotated[str | None, _Shapes] = None,
    mesh: Annotated[str | None, _Mesh] = None,
    placement: Annotated[list[str] | None, _Placement] = None,
    override: Annotated[list[str] | None, _Override] = None,
    world_size: Annotated[int | None, _World] = None,
    gpu: Annotated[str, _Gpu] = "h200",
    network: Annotated[str, _Network] = "infiniband",
    dtype: Annotated[str, _Dtype] = "float32",
    tokens: Annotated[int, _Tokens] = 16384,
    experts_per_token: Annotated[int | None, _Experts] = None,
    json_output: Annotated[bool, _Json] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Say what an optimizer step will do and cost, on any number of GPUs, without one.

    Args:
        model: `pkg.module:build`.
        shapes: Name of a well-known model.
        mesh: Axes and sizes.
        placement: What axes do, where that is not what their names say.
        override: Which parameters take which route.
        world_size: Number of ranks the mesh must have.
        gpu: What the job runs on.
        network: What joins the nodes.
        dtype: Of parameters given by name.
        tokens: Of a training step, for each GPU.
        experts_per_token: How many experts a token passes through.
        json_output: Print JSON instead of text.
        verbose: Show tracebacks.
    """
    with one_line_errors("plan", verbose=verbose):
        forecast = _forecast(
            model,
            shapes,
            read_mesh(mesh, placement or (), world_size=world_size),
            machine=(choice("--gpu", gpu, GPUS), choice("--network", network, NETWORKS)),
            dtype=choice("--dtype", dtype, DTYPES),
            overrides=read_overrides(override or ()),
        )
        training = _training(forecast, shapes, tokens, experts_per_token)
        # stdout as it is: no colour, the same text in a file and on a terminal.
        print(json.dumps(as_json(forecast, training)) if json_output else report(forecast, training))


def _forecast(
    model: str | None,
    shapes: str | None,
    where: tuple[Any, Any],
    *,
    machine: tuple[str, str],
    dtype: str,
    overrides: dict[str, Any] | None,
) -> "Forecast":
    if (model is None) == (shapes is None):
        found = "neither a model nor --shapes" if model is None else "both a model and --shapes"
        raise InputError(f"model: {found}. Give one of them: pkg.module:build, or --shapes llama-3-8b.")
    import torch

    from meshmuon.plan.models import MODELS
    from meshmuon.planner import plan_for

    if shapes is not None and shapes not in MODELS:
        raise InputError(f"--shapes: unknown model {shapes!r}. {closest(shapes, MODELS)}")
    subject = build_model(model) if model is not None else shapes
    assert subject is not None
    gpu, network = machine
    try:
        return plan_for(subject, *where, gpu, network=network, dtype=getattr(torch, dtype), overrides=overrides)
    except ValueError as error:
        if "overrides=" in str(error):  # said to who calls Muon
            raise InputError(f"{error}. Here that is --override PATTERN=ROUTE.") from error
        raise


def _training(
    forecast: "Forecast", shapes: str | None, tokens: int, experts_per_token: int | None
) -> TrainingStep | None:
    from meshmuon.plan.models import EXPERTS_PER_TOKEN

    chosen = EXPERTS_PER_TOKEN.get(shapes or "") if experts_per_token is None else experts_per_token
    return estimate_training(forecast, tokens=tokens, experts_per_token=chosen)
