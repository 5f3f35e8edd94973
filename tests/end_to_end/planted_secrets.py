"""A training program with a secret in every input of telemetry, which ends with an exception.

The secrets are generated here, so that no scanner of repositories reports this file.
"""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from esper_telemetry import ConsoleSink, MLflowSink, PrometheusSink, Telemetry, TensorBoardSink, WandbSink
from esper_telemetry.alarms.detectors import Verdict
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record, RunInfo, RunStatus
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, Sink

SECRETS: list[str] = []
"""Every secret: twenty characters, and forty for W&B's key."""


def made_up(label: str, form: str = "{}") -> str:
    """Add a secret of twenty letters and digits that depend on the label; return it in that form."""
    digest = sha256(label.encode()).hexdigest()
    SECRETS.append("".join(c.upper() if n % 3 else c for n, c in enumerate(digest[:20])))
    return form.format(SECRETS[-1])


CONFIG = {
    "api_key": made_up("config api_key"),
    "tokens": made_up("config tokens"),
    "hub": {"hf_pat": made_up("config pat"), "signing_key": made_up("config signing")},
    "accounts": [("password", made_up("config pair", "{}!"))],
    "store": made_up("config address", "https://me:{}@with@signs@host/path"),
    "arguments": Namespace(lr=3e-4, secret_key=made_up("config namespace")),
    "bytes": {"passphrase": made_up("config bytes").encode()},
    made_up("config name", "sk_live_{}"): True,
    "database": made_up("config database", "Server=db;User Id=sa;Password={};Encrypt=true"),
    "blob": made_up("config blob", "DefaultEndpointsProtocol=https;AccountKey={}==;EndpointSuffix=x"),
    "json": made_up("config json", '{{"auth_token": "{}", "n": 1}}'),
    "pem": made_up("config pem", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"),
    "shapes": [made_up(prefix, f"{prefix}{{}}") for prefix in ("glpat-", "gsk_", "npm_", "ghs_", "r8_")],
}
FACTS = {"access_token": made_up("facts token"), "note": made_up("facts header", "Authorization: Bearer {}")}
TAGS = (made_up("tag", "hf_{}"), made_up("tag assignment", "wandb_key={}"))
NOTES = f"log in with {CONFIG['api_key']} or {made_up('notes', 'API_KEY={}')} or {made_up('notes query', 'https://h/?token={}&page=2')}"
NAME = made_up("name", "run-ghp_{}")
COMMAND = (
    *("--wandb-api-key", made_up("command option"), made_up("command assignment", "--token={}")),
    *(made_up("command variable", "HF_TOKEN={}"), "-p", made_up("command short"), made_up("command address", "mlflow:http://me:{}@host")),
)
ENVIRONMENT = {
    "WANDB_API_KEY": sha256(b"environment wandb").hexdigest()[:40],
    "AWS_SECRET_ACCESS_KEY": made_up("environment aws"),
    "PGPASSWORD": made_up("environment password"),
    "DATABASE_URL": made_up("environment address", "postgresql://me:{}@host/db"),
    "WANDB_MODE": "offline",
}
EXCEPTION = f"refused: {made_up('exception', 'api_key={}')}; {ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}; {made_up('exception basic', 'https://{}@host/')}"
CAUSE = made_up("cause", "Incorrect API key provided: {}.")
REASON, DETAILS = made_up("reason", "new password: {}"), {"secret": made_up("details"), "seed": 4}
SENTENCE = made_up("alarm", "the store says 401 (Cookie: sid={})")
EVIDENCE = {"headers": {"X-Api-Key": made_up("evidence")}, "rows": [1.0, 2.0]}
REMARK = {"update": 1, "text": made_up("remark", "curl -u me:{} host"), "password": made_up("remark password")}
EVENT = {"credentials": {"user": "me", "value": made_up("event")}, "keys": ["policy/kl"]}
SECRETS.append(ENVIRONMENT["WANDB_API_KEY"])
SERVER = made_up("server", "postgresql://me:{}%40x@127.0.0.1:9/runs")
SINK_TOKEN = made_up("sink address")
SINK_ERROR = f"401 for {ENVIRONMENT['PGPASSWORD']}, {made_up('sink error', 'bearer {}')}, {made_up('sink error key', 'xoxb-{}')}"
PRINTED = made_up("printed", "password={}")


class Accuser:
    def step(self, record: Record) -> Verdict:
        if record.axes.update != 2:
            return Verdict((), 0, {}, ())
        alarm = Alarm(
            *(record.seq, record.axes, "mine/refused", AlarmEvent.RAISE, 0.9, AlarmLevel.CRITICAL, "policy/kl"),
            since=2,
            incident=1,
            text=SENTENCE,
            evidence=EVIDENCE,
        )
        return Verdict((alarm,), 0, {}, (("remark", REMARK), ("mine", EVENT)))

    def intervention(self) -> None:
        """Do nothing."""

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Verdict:
        return Verdict((), 0, {}, ())

    def rule(self, kind: str) -> None:
        """Return no evidence."""


def accuser(facts: Mapping[str, Any]) -> Accuser:
    return Accuser()


class RefusedSink:
    """A sink of the sink process whose address contains a secret, and which prints and raises others."""

    in_process = False
    name = f"refused:http://host?token={SINK_TOKEN}"

    def open(self, run: RunInfo) -> None:
        print(PRINTED, "and", ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
        logging.getLogger("requests").warning("%s", CONFIG["api_key"])

    def write(self, records: Sequence[Record]) -> None:
        raise PermanentSinkError(SINK_ERROR)

    def close(self, status: RunStatus) -> None:
        """Do nothing."""


def sinks(run_dir: Path) -> list[Sink]:
    """Return every bundled sink, with a database whose driver is missing, and the sink that raises."""
    return [
        *(ConsoleSink(), TensorBoardSink(), WandbSink(mode="offline"), MLflowSink(), PrometheusSink(run_dir / "metrics.prom")),
        *(MLflowSink(SERVER), RefusedSink()),
    ]


def main(run_dir: Path, *, worker: bool) -> None:
    sys.argv = ["train.py", *COMMAND]
    os.environ.update(ENVIRONMENT)
    logging.basicConfig()
    with (
        suppress(RuntimeError),
        Telemetry(
            sinks(run_dir),
            run_dir=run_dir,
            name=NAME,
            config=CONFIG,
            facts=FACTS,
            tags=TAGS,
            notes=NOTES,
            detect=accuser,
            offload=worker,
            report=True,
            close_timeout=60.0,
        ) as telemetry,
    ):
        telemetry.on_alarm(lambda alarm: print(alarm.text, alarm.evidence))
        for update in range(1, 4):
            telemetry.log({"policy/kl": 0.01 * update})
            telemetry.flush(env_step=update * 100)
        telemetry.notify_intervention(REASON, **DETAILS)
        try:
            raise KeyError(CAUSE)
        except KeyError as error:
            raise RuntimeError(f"{EXCEPTION} {CAUSE}") from error
    print("run", telemetry.run and telemetry.run.name)
