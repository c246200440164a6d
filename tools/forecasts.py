#!/usr/bin/env python3
"""How far plans are from what is then measured: bytes against `airs mem`, tokens a second against `airs run`.

    tools/forecasts.py AIRS MODEL...

Each model is planned for and run at two budgets: what the machine gives, and just enough for a short context. The store's
home is a new one, so that forecasts come first from what the machine can do alone, and then from the receipts of the runs
before. What is forecast is forecast before it is measured. Exits with 1 if bytes are off by more than 2 %, or speeds with
receipts by more than 20 %.
"""

import json
import os
import subprocess
import sys
import tempfile

BYTES_PERCENT_MAX = 2.0
SPEED_PERCENT_MAX = 20.0
PROMPT = 256
PREDICTED = 64


def airs(program, *args):
    done = subprocess.run([program, *args, "-o", "json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"airs {' '.join(args)}: {done.stderr}")
    return json.loads(done.stdout)


def percent(forecast, measured):
    return 100.0 * (forecast / measured - 1.0)


def budgets(program, model):
    """Contexts and budgets to plan for."""
    yield 4096, "auto"
    short = airs(program, "plan", model, "-c", "512")
    # A MiB more, since what a process has mapped of its own files varies a little from start to start.
    yield 512, f"{-(-short['bytes']['total'] // (1 << 20)) + 1}MiB"


def speeds(program, model, flags):
    """Tokens a second, as forecast before a run and as measured in it."""
    tokens = ",".join(str(100 + i) for i in range(PROMPT))
    forecast = airs(program, "plan", model, *flags, "-p", str(PROMPT))["forecast"]["predicted_per_second"]
    run = airs(program, "run", model, *flags, "--tokens", tokens, "-n", str(PREDICTED), "--temp", "0", "--ignore-eos")
    return forecast, run["timings"]["predicted_per_second"]


def main():
    program, models = sys.argv[1], sys.argv[2:]
    failed = False
    print("model | context | budget | plan MiB | peak MiB | bytes % | first tok/s | % | with receipts | measured | %")
    with tempfile.TemporaryDirectory() as home:
        os.environ["AIRS_HOME"] = home
        for model in models:
            for context, budget in budgets(program, model):
                flags = ["-c", str(context), "--memory", budget]
                planned = airs(program, "plan", model, *flags)["bytes"]["total"]
                peak = airs(program, "mem", model, *flags)["kernel"]["peak_rss_bytes"]
                first, measured_first = speeds(program, model, flags)
                again, measured = speeds(program, model, flags)
                bytes_off, speed_off = percent(planned, peak), percent(again, measured)
                failed |= abs(bytes_off) > BYTES_PERCENT_MAX or abs(speed_off) > SPEED_PERCENT_MAX
                mib = 1 << 20
                print(
                    f"{os.path.basename(model)} | {context} | {budget} | {planned / mib:.1f} | {peak / mib:.1f} | {bytes_off:+.1f} | "
                    f"{first:.1f} | {percent(first, measured_first):+.0f} | {again:.1f} | {measured:.1f} | {speed_off:+.0f}",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
