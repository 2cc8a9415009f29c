"""Whether `probe` finds the rates of both levels of link on two hosts of two ranks.

    python benchmarks/link_rates.py --json docs/data/link_rates.json

The hosts are namespaces (tests/hosts.py), and need root. The link between hosts has a set rate in each direction; the
loopback of a host has one for both directions together, so each of two ranks that exchange data has half of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the hosts are the tests' own
from hosts import make_hosts, slurm_variables, wait_for

RATES = [(2.0, 1.0), (1.0, 0.5), (0.5, 0.1)]
"""Gigabits per second of a host's loopback, and of the link between hosts."""
ALLOWED = 0.15


def measure(within: float, between: float, minutes: float) -> dict[str, Any]:
    """Run `probe` on both hosts; found rates are in gigabits per second."""
    with make_hosts(2, gigabits=between) as hosts:
        ranks = []
        for rank in range(4):
            host = hosts[rank // 2]
            host.limit_loopback(within)
            command = [sys.executable, "-m", "meshwright", "probe", "--device", "cpu", "--json"]
            ranks.append(host.start(command, env=slurm_variables(rank), stdout=subprocess.PIPE, text=True))
        if any(wait_for(ranks, 60 * minutes)):
            raise SystemExit("A rank of `probe` failed.")
        links = json.loads(ranks[0].stdout.read())["links"]
    found = {name: 8e-9 * links[name]["bandwidth"] for name in ("within", "between")}
    set_rates = {"within": within / 2, "between": between}
    return {"set": set_rates, "found": found, "error": {name: found[name] / set_rates[name] - 1 for name in found}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0, help="end the ranks of one measurement after this time")
    options = parser.parse_args()
    rows = []
    print("| link | set, Gbit/s | found | error |\n| --- | --- | --- | --- |")
    for within, between in RATES:
        row = measure(within, between, options.minutes)
        rows.append(row)
        for name in ("within", "between"):
            print(
                f"| {name} | {row['set'][name]:g} | {row['found'][name]:.3f} | {row['error'][name]:+.1%} |", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows for error in row["error"].values() if abs(error) > ALLOWED]
    if wrong:
        raise SystemExit(f"{len(wrong)} rates differ by more than {ALLOWED:.0%}.")


if __name__ == "__main__":
    main()
