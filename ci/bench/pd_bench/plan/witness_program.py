# SPDX-License-Identifier: Apache-2.0
"""Run by the Python that has AISimulate: predictions of fleets, from JSON lines on standard input to JSON lines on standard
output.

In: AISimulate's own configs. Out: `{"in_time", "served"}`, in the same order; `{"error"}` where it failed. It imports
nothing of ours: that Python may not have it.
"""

import json
import sys


def main() -> None:
    """Answer every line."""
    from aisimulate import (  # type: ignore[import-not-summary, unused-ignore]
        CorePredictionConfig,
        EngineReplayRunnerFactory,
    )
    from aisimulate.predict import (  # type: ignore[import-not-summary, unused-ignore]
        run_prediction,
    )

    for line in sys.stdin:
        try:
            config = CorePredictionConfig.model_validate(json.loads(line))
            summary = run_prediction(
                config, stack="engine", runner_factory=EngineReplayRunnerFactory()
            ).summary
            said = {
                "in_time": summary["goodput_completed_requests"],
                "served": summary["completed_requests"],
            }
        except Exception as error:  # one prediction of many
            said = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
