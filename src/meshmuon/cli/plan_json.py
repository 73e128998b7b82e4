"""What `meshmuon plan --json` prints: all that the report says, as plain JSON types."""

from typing import TYPE_CHECKING, Any

from meshmuon.cli.plan_report import TrainingStep, batches_of

if TYPE_CHECKING:
    from meshmuon.plan.outlook import Forecast, RouteForecast


def as_json(forecast: "Forecast", training: TrainingStep | None) -> dict[str, Any]:
    """Give everything the report says, and each GPU's numbers, as plain JSON types.

    Args:
        forecast: What was planned.
        training: The training step beside it.

    Returns:
        The record.
    """
    from meshmuon.plan.describe import cuts_of, rows_of

    return {
        "model": forecast.model,
        "layout": forecast.layout,
        "ranks": forecast.ranks,
        "gpu": forecast.hardware.name,
        "network": forecast.hardware.across.name,
        "parameters": forecast.parameters,
        "matrices": forecast.matrices,
        "routing": [
            {
                "algorithm": row.parameters[0].routing.algorithm,
                "reason": row.reason,
                "names": row.name,
                "count": len(row.parameters),
                "shape": list(row.parameters[0].shape),
                "layout": cuts_of(row.parameters[0]),
            }
            for row in rows_of(forecast.plan.parameters)
        ],
        "batches": batches_of(forecast.plan),
        "bytes": {
            "parameters": forecast.parameter_bytes,
            "state": forecast.state_bytes,
            "needed": forecast.bytes_needed,
            "fits": forecast.fits,
        },
        "chosen": forecast.chosen,
        "routes": {r.route: _route_record(r) for r in forecast.routes},
        "training step": None
        if training is None
        else {
            "tokens per gpu": training.tokens,
            "active parameters": training.parameters,
            "ms": 1e3 * training.seconds,
            "optimizer share": forecast.route().ms / (1e3 * training.seconds),
        },
    }


def _route_record(route: "RouteForecast") -> dict[str, Any]:
    return {
        "ms": route.ms,
        "serial ms": route.serial_ms,
        "products ms": 1e3 * route.compute,
        "wire ms": 1e3 * route.exchange,
        "elementwise ms": 1e3 * route.elementwise,
        "host ms": 1e3 * route.host,
        "exchanges": route.exchanges,
        "workspace bytes": route.workspace,
        "flops": list(route.flops.each),
        "bytes sent": list(route.bytes_sent.each),
        "balance": route.loads.balance,
    }
