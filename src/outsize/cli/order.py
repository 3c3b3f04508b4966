"""`outsize order`: trainings that are asked for now and done by `outsize worker`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli._site import RecipeArgument

if TYPE_CHECKING:
    from outsize.runs.orders import Order

NumberArgument = Annotated[int, typer.Argument(metavar="ID", help="Number of the order.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="Queue trainings for `outsize worker`: one by one, resumed whatever ends them.",
        no_args_is_help=True,
    )
    for one in (add, cancel, retry, show):
        group.command(one.__name__)(one)
    group.command("list")(list_orders)
    app.add_typer(group, name="order")


def add(recipe: RecipeArgument) -> int:
    """Queue a recipe as it is now. The same recipe, base, data and seed is the same order."""
    from outsize.app.orders import add_order
    from outsize.app.tasks.protocol import task_of
    from outsize.cli._site import recipe_and_run
    from outsize.runs.orders import Orders, orders_folder

    chosen, _ = recipe_and_run(recipe)
    task_of(chosen).require(chosen)
    order, is_new = add_order(Orders(orders_folder()), chosen)
    known = "" if is_new else "known already, "
    print(f"order {order.id}: {known}{order.state}, {order.run}")
    return 0


def list_orders(*, as_json: JsonOption = False) -> int:
    """All orders, first the first."""
    from outsize.cli._tables import print_table
    from outsize.runs.orders import Orders, orders_folder

    found = Orders(orders_folder()).all()
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2, allow_nan=False))
        return 0
    rows = [(str(one.id), one.name, _state(one), str(one.run)) for one in found]
    print_table("Orders", ("id", "name", "state", "run"), rows, words=(1, 2, 3))
    return 0


def show(number: NumberArgument, *, as_json: JsonOption = False) -> int:
    """One order, and everything that happened to it."""
    from outsize.cli._tables import print_table
    from outsize.runs.orders import Orders, orders_folder

    orders = Orders(orders_folder())
    order, events = orders.get(number), orders.events(number)
    if as_json:
        told: list[dict[str, Any]] = [
            {"at": one.at, "was": one.was, "state": one.state, "token": one.token, "why": one.why}
            for one in events
        ]
        whole = order.to_json() | {"recipe": dict(order.recipe), "events": told}
        print(json.dumps(whole, indent=2, allow_nan=False))
        return 0
    print(f"order {order.id} ({order.name}): {_state(order)}, {order.run}")
    if order.why:
        print(order.why)
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at)), one.state, one.why)
        for one in events
    ]
    print_table("What happened", ("at", "state", "why"), rows, words=(0, 1, 2))
    return 0


def cancel(number: NumberArgument) -> int:
    """Cancel an order; one that is worked at saves and stops at its next step."""
    from outsize.runs.orders import HELD, Orders, orders_folder

    order = Orders(orders_folder()).cancel(number)
    is_asked = order.state in HELD
    print(f"order {number}: {'its worker is asked to stop it' if is_asked else order.state}")
    return 0


def retry(number: NumberArgument) -> int:
    """Queue an order again that failed, was stopped or was cancelled; it goes on from its newest checkpoint."""
    from outsize.runs.orders import Orders, orders_folder

    print(f"order {number}: {Orders(orders_folder()).retry(number).state}")
    return 0


def _state(order: Order) -> str:
    """A state as people read it."""
    if order.state == "waiting":
        return "waiting for the card"
    if order.state != "failed":
        return order.state
    if order.retry_at is None:
        return "failed for good"
    return f"failed, tried again in {max(0.0, order.retry_at - time.time()):.0f} s"
