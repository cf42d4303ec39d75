"""The command line: verbs, options, help. What a verb does stands in `verbs` and `demo`.

Heavy imports happen inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Literal, NoReturn

import typer

PROGRAM = "./start.sh"
app = typer.Typer(
    help="Serve GLM-5.3-Flash from EXL3 weights, OpenAI-compatible. Without a verb: start.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Settings: .env and the shell; docs/configuration.md lists them. "
    "Exit codes: 0 ok, 2 bad configuration, 3 refused before anything was touched, "
    "4 launch failed and rolled back, 5 unhealthy, 130 interrupted.",
)
Steal = Annotated[bool, typer.Option("--steal", help="Take over nodes whose lease ran out.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def perform(action: Callable[..., int], *arguments: object, **options: object) -> NoReturn:
    """Run a verb and exit with its code; errors are printed with why and fix."""
    from glm_launch.errors import ExitCode, LaunchError
    from glm_launch.ui import Ui

    ui = Ui()
    try:
        code = action(ui, *arguments, **options)
    except LaunchError as error:
        ui.error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        code = ExitCode.OK
    finally:
        ui.stop_clock()
    sys.exit(int(code))


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        start()


@app.command()
def start(
    steal: Steal = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the supervisor's log; Ctrl-C detaches.")
    ] = False,
) -> None:
    """Start all ranks; returns when the model answered, and they go on running."""
    from glm_launch import verbs

    perform(verbs.start, steal=steal, follow=follow)


@app.command()
def stop() -> None:
    """Stop all ranks; leaves no process."""
    from glm_launch import verbs

    perform(verbs.stop)


@app.command()
def restart(steal: Steal = False) -> None:
    """Check everything, then stop and start."""
    from glm_launch import verbs

    perform(verbs.restart, steal=steal)


@app.command()
def rollback(steal: Steal = False) -> None:
    """Return to the last image and preset that answered."""
    from glm_launch import maintain

    perform(maintain.rollback, steal=steal)


@app.command()
def status(json: Json = False) -> None:
    """Show every rank and whether the model answers."""
    from glm_launch import verbs

    perform(verbs.status, as_json=json)


@app.command()
def logs(
    target: Annotated[str, typer.Argument(help="head, worker, all, or a rank's number.")] = "head",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines to show.")] = 100,
    json: Json = False,
) -> None:
    """Show what a rank said; kept after it ended."""
    from glm_launch import verbs

    perform(verbs.show_logs, target, follow=follow, count=lines, as_json=json)


@app.command()
def plan(
    json: Json = False,
    kv: Annotated[bool, typer.Option("--kv", help="Show what the KV cache costs instead.")] = False,
    gpu_gib: Annotated[float, typer.Option(min=0, help="With --kv: memory of one GPU in GiB.")] = 0,
    gpu: Annotated[str, typer.Option(help="With --kv: compute capability, such as 8.0.")] = "9.0",
) -> None:
    """Show the exact command of every rank and change nothing."""
    from glm_launch import kv_view, verbs

    if kv:
        perform(kv_view.show, as_json=json, gpu_gib=gpu_gib, capability=gpu)
    perform(verbs.show_plan, as_json=json)


@app.command()
def doctor(
    json: Json = False,
    record: Annotated[str, typer.Option(help="Write the facts of all nodes to this file.")] = "",
    verify_weights: Annotated[
        bool, typer.Option("--verify-weights", help="Read every byte of the weights again.")
    ] = False,
) -> None:
    """Show everything that would refuse a launch, and how to fix it."""
    from glm_launch import examine

    perform(examine.doctor, as_json=json, record=record, verify_weights=verify_weights)


@app.command()
def report(
    keep_addresses: Annotated[
        bool, typer.Option("--keep-addresses", help="Leave addresses and names as they are.")
    ] = False,
    folder: Annotated[str, typer.Option(help="Where to write it; default: here.")] = "",
) -> None:
    """Write one archive for a bug report, without keys and tokens."""
    from glm_launch import report as report_module

    perform(report_module.report, keep_addresses=keep_addresses, folder=folder)


@app.command()
def download(json: Json = False) -> None:
    """Bring target and drafter to every node, verified, and start nothing."""
    from glm_launch import maintain

    perform(maintain.download, as_json=json)


@app.command()
def ablit(
    action: Annotated[str, typer.Argument(help="fetch, status, verify or direction.")] = "status",
    file: Annotated[str, typer.Argument(help="The file that `direction` keeps.")] = "",
    name: Annotated[str, typer.Option(help="The name it gets.")] = "dealign",
    json: Json = False,
) -> None:
    """Fetch, show or verify a donor's tensors for weight edits; see ablit/README.md."""
    from glm_launch import ablit as ablit_module

    if action not in ablit_module.ACTIONS:
        raise typer.BadParameter(f"{action} is none of {', '.join(ablit_module.ACTIONS)}")
    perform(ablit_module.run, action, file=file, name=name, as_json=json)


@app.command()
def drafter(
    action: Annotated[Literal["pack"], typer.Argument(help="pack: convert it to EXL3.")],
    bits: Annotated[int, typer.Option(min=2, max=8, help="Bits per weight.")] = 6,
    out: Annotated[str, typer.Option(help="New folder; default: beside the drafter.")] = "",
) -> None:
    """Pack the drafter of the settings as EXL3; goes on where it was interrupted."""
    from glm_launch import drafter as drafter_module

    assert action == "pack"
    perform(drafter_module.pack, bits=bits, out=out)


@app.command()
def recode(
    verify: Annotated[bool, typer.Option(help="Hash what exists already.")] = False,
) -> None:
    """Make the matrices of DENSE_RECODE=exl3; goes on where it was interrupted."""
    from glm_launch import recode as recode_module

    perform(recode_module.run, verify=verify)


@app.command()
def key() -> None:
    """Make a key for the API in a file that only you can read."""
    from glm_launch import maintain

    perform(maintain.key)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Exit after the answer.")] = False,
) -> None:
    """Serve a small model on this machine, without a GPU, until Ctrl-C."""
    from glm_launch import demo as demo_module

    perform(demo_module.run, once=once)


@app.command(context_settings=PASS_ON)
def test(context: typer.Context) -> None:
    """Run the tests; arguments go to pytest, --lint adds the static checks."""
    from glm_launch import verbs

    perform(lambda _ui: verbs.test(context.args))


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure the running service; `bench decode --help` tells how."""
    from glm_launch import verbs

    perform(lambda _ui: verbs.bench(context.args))


def main() -> None:
    """Entry point; an unknown verb prints the help and exits 2."""
    first = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if first is None or first in known_verbs():
        app(prog_name=PROGRAM)
    sys.stderr.write(f"unknown verb: {first}\n")
    with suppress(SystemExit):
        app(["--help"], prog_name=PROGRAM)
    sys.exit(2)


def known_verbs() -> set[str]:
    """The names of all verbs."""
    callbacks = (command.callback for command in app.registered_commands)
    return {callback.__name__ for callback in callbacks if callback is not None}


if __name__ == "__main__":
    main()
