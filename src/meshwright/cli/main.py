"""The command line: one file per verb. Parse, call, print."""

from __future__ import annotations

import sys

import typer

from meshwright.cli import (
    adopt,
    checkpoint,
    compare,
    explain,
    export,
    layout,
    plan,
    preflight,
    probe,
    rehearse,
    serve,
    train,
    validate,
    verify,
)
from meshwright.cli.outcome import main_with_exit_codes

app = typer.Typer(
    name="meshwright",
    help="One job, one loop, every parallel strategy: plan, rehearse, verify, then train.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("adopt", epilog=adopt.NOTES)(adopt.adopt)
app.command("compare", epilog=compare.NOTES)(compare.compare)
app.command("explain", epilog=explain.NOTES)(explain.explain)
app.command("export", epilog=export.NOTES)(export.export)
app.command("layout", epilog=layout.NOTES)(layout.layout)
app.command("plan", epilog=plan.NOTES)(plan.plan)
app.command("preflight", epilog=preflight.NOTES)(preflight.preflight)
app.command("probe", epilog=probe.NOTES)(probe.probe)
app.command("rehearse", epilog=rehearse.NOTES)(rehearse.rehearse)
app.command("serve", epilog=serve.NOTES)(serve.serve)
app.command("train", epilog=train.NOTES)(train.train)
app.command("validate", epilog=validate.NOTES)(validate.validate)
app.command("verify", epilog=verify.NOTES)(verify.verify)


def main() -> None:
    sys.exit(main_with_exit_codes(app))


if __name__ == "__main__":
    main()
