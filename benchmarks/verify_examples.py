"""Verify every example under every data strategy and policy, and write the verdicts down.

python benchmarks/verify_examples.py --ranks 4 --json docs/data/verify_examples.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = ("gpt", "cnn", "resnet", "hf_gpt2")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "fsdp:no-shard", "hsdp=2x2")
POLICIES = ("", "ac=full", "mb=1", "bf16", "offload=optimizer")


def verify(example: str, policy: str, ranks: int) -> list[dict]:
    """One call of the command line: all strategies under one policy."""
    names = [",".join(filter(None, (strategy, policy))) for strategy in STRATEGIES]
    words = ["verify", f"examples/{example}.py", "--ranks", str(ranks), "--device", "cpu", "--json", "--strategies"]
    done = subprocess.run([sys.executable, "-m", "meshwright", *words, *names], stdout=subprocess.PIPE, text=True)
    results = json.loads(done.stdout)["results"] if done.stdout else []
    return [result for result in results if result["strategy"] in names]  # without that of one process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--examples", nargs="+", default=EXAMPLES)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for example in asked.examples:
        for policy in asked.policies:
            start = time.perf_counter()
            results = verify(example, policy, asked.ranks)
            rows += [{"example": example, "policy": policy or "none", **result} for result in results]
            worst = max((result["loss_max_rel"] or 0.0 for result in results), default=float("nan"))
            equal = sum(result["equal"] for result in results)
            seconds = time.perf_counter() - start
            print(
                f"{example:8} {policy or 'none':18} equal {equal}/{len(STRATEGIES)} loss {worst:.1e} {seconds:.0f} s",
                flush=True,
            )
            for result in results:
                if not result["equal"]:
                    print(f"    {result['strategy']}: {result['first_difference']}", flush=True)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    wanted = len(asked.examples) * len(asked.policies) * len(STRATEGIES)
    sys.exit(0 if len(rows) == wanted and all(row["equal"] for row in rows) else 1)


if __name__ == "__main__":
    main()
