"""`leaderless robot`: serve an arm, try it, and stop it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from leaderless.cli.servers import HostOption, PortOption, TokenOption

robot = typer.Typer(help="Serve an arm within its limits, try it, and stop it.", no_args_is_help=True)

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the arm's server.")]


@robot.command("serve")
def serve_robot(
    name: Annotated[
        str, typer.Argument(metavar="ROBOT", help="Robot: dummy, franka, or a function package.module:function.")
    ],
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the robot as key=value. May be given several times.")
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8765,
    token: TokenOption = None,
) -> None:
    """Let clients move an arm within its limits, until Ctrl-C.

    A real arm begins stopped. A person types `release` and Enter here to let it move, and `stop` to stop it.
    """
    from leaderless.cli import robot_actions

    robot_actions.serve_robot(name, option or [], host, port, token)


@robot.command("try")
def try_robot(
    address: AddressArgument,
    *,
    token: TokenOption = None,
    policy: Annotated[Literal["random", "rest"], typer.Option(help="Policy: random actions, or no movement.")] = "rest",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps at most.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode and of random actions.")] = 0,
) -> None:
    """Play one episode on an arm, and show what each step did."""
    from leaderless.cli import robot_actions

    robot_actions.try_robot(address, token, policy, steps, seed)


@robot.command("stop")
def stop_robot(
    address: AddressArgument,
    *,
    token: TokenOption = None,
    reason: Annotated[str, typer.Option(help="Reason, for those who look at the arm.")] = "",
) -> None:
    """Stop an arm at once, also while another client moves it. A person at its server has to release it."""
    from leaderless.cli import robot_actions

    robot_actions.stop_robot(address, token, reason)
