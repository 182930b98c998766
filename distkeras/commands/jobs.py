"""``distkeras jobs``: jobs on a job server, sent and watched."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from distkeras.data.padding import padding_json
from distkeras.flags import PAIRS, add_trainer_flags, columns_of, given_options, values_of
from distkeras.job_server.client import TOKEN, JobClient, RemoteJob
from distkeras.job_server.errors import JobState
from distkeras.job_server.submission import LEFT_OUT
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import all_rules, from_text

URL = "DISTKERAS_URL"
_DEFAULT_URL = "http://127.0.0.1:8571"


def add_actions(jobs: argparse.ArgumentParser) -> None:
    """Add what ``distkeras jobs`` can do."""
    actions = jobs.add_subparsers(dest="action", required=True)
    _add_submit(_action(actions, "submit", "send a job"))
    _add_predict(_action(actions, "predict", "send a predict job"))
    listing = _action(actions, "list", "list jobs, the latest first")
    listing.add_argument("--state", choices=[state.value for state in JobState], help="only jobs in this state")
    listing.add_argument("--text", help="only jobs with this text in their name or user name")
    listing.add_argument("--tag", help="only jobs with this tag")
    listing.add_argument("--sort", choices=list(_SORTS), default="created", help="order (default: %(default)s)")
    listing.add_argument("--count", type=int, default=20, metavar="N", help="number of entries (default: %(default)s)")
    for name, text in (
        ("watch", "show a job as it gets on, until it has ended"),
        ("show", "print what the server says of a job, as JSON"),
        ("cancel", "end a job"),
        ("remove", "remove an ended job, and its files"),
    ):
        _action(actions, name, text).add_argument("job", help="the job's id")
    again = _action(actions, "resubmit", "send a job once more, as yours, with the same model")
    again.add_argument("job", help="the job's id")
    again.add_argument(
        "--set", **PAIRS, help="fields of its description with new values: data=PLACE, options.learning_rate=0.01, …"
    )
    printed = _action(actions, "log", "print what a job's driver and Spark print")
    printed.add_argument("job", help="the job's id")
    printed.add_argument("-f", "--follow", action="store_true", help="print further output until the job has ended")
    fetch = _action(actions, "fetch", "fetch the model of a job that is done")
    fetch.add_argument("job", help="the job's id")
    fetch.add_argument("--out", type=Path, default=Path("model.keras"), help="file to write (default: %(default)s)")
    token = _action(actions, "token", "print a new token, which the server shows only once")
    token.add_argument("--note", default="", help="purpose of the token")
    token.add_argument("--days", type=float, metavar="N", help="days of validity (default: as long as your own token)")
    token.add_argument("--user", help="user of the token; only administrators can set it")
    _action(actions, "tokens", "list your tokens; all tokens, as an administrator")
    revoke = _action(actions, "revoke", "revoke a token, and the tokens that it has made")
    revoke.add_argument("token", help="id of the token")
    revoke.add_argument("--alone", action="store_true", help="keep the tokens that it has made")
    user = _action(actions, "user", "add a user, as an administrator")
    user.add_argument("name", help="name of the user")
    user.add_argument("--role", choices=["user", "admin", "metrics"], default="user", help="default: %(default)s")
    _action(actions, "users", "list users, as an administrator")
    _action(actions, "remove-user", "revoke all tokens of a user, as an administrator").add_argument(
        "name", help="name of the user"
    )
    _action(actions, "reinstate-user", "let a removed user have tokens again, as an administrator").add_argument(
        "name", help="name of the user"
    )
    audit = _action(actions, "audit", "list the audit log, the latest entries first, as an administrator")
    audit.add_argument("--count", type=int, default=100, metavar="N", help="number of entries (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    _ACTIONS[arguments.action](_client(arguments), arguments)


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    action.add_argument(
        "--url", default=os.environ.get(URL, _DEFAULT_URL), help=f"the server's URL ({URL}; %(default)s)"
    )
    action.add_argument("--token-file", type=Path, metavar="FILE", help=f"file with your token (default: {TOKEN})")
    action.add_argument("--plain-http", action="store_true", help="send the token without TLS to another machine")
    return action


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, type=Path, help="built model, as Keras saves it (.keras)")
    parser.add_argument("--data", required=True, help="Parquet to train on, on the server")
    parser.add_argument("--rule", required=True, choices=list(all_rules()), metavar="RULE", help="the update rule")
    parser.add_argument("--set", **PAIRS, help="hyper-parameters of the rule")
    _add_job_flags(parser)
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="COMMITS", help="interval (default: %(default)s)"
    )
    parser.add_argument(
        "--early-stopping", **PAIRS, help="data=PLACE with validation rows on the server, patience, monitor, …"
    )
    add_trainer_flags(parser.add_argument_group("training"))


def _add_predict(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="built model, as Keras saves it (.keras)")
    model.add_argument("--job", help="id of a finished job whose model predicts")
    parser.add_argument("--data", required=True, help="Parquet to predict for, on the server")
    parser.add_argument("--output", required=True, help="folder to write to, on the server")
    _add_job_flags(parser)
    parser.add_argument("--features", nargs="+", metavar="COLUMN", help="columns to predict from (default: features)")
    parser.add_argument("--predictions", nargs="+", metavar="COLUMN", help="new columns (default: prediction)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="most rows per call of the model (default: 1024)")
    parser.add_argument(
        "--batch-bytes", type=int, metavar="N", help="largest size of a call's arrays (default: 64 MiB)"
    )
    parser.add_argument("--vectors", action="store_true", help="flat outputs as ML vectors, in place of arrays")


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="name of the job")
    parser.add_argument("--tags", nargs="+", default=(), metavar="TAG", help="tags of the job")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait until the job has ended, at most so long")


def _client(arguments: argparse.Namespace) -> JobClient:
    file = arguments.token_file
    token = None if file is None else file.read_text(encoding="utf-8").strip()
    return JobClient(arguments.url, token, plain_http=arguments.plain_http)


def _submit(client: JobClient, arguments: argparse.Namespace) -> None:
    optimizer = arguments.optimizer, values_of(arguments.optimizer_set)
    arguments.optimizer, arguments.optimizer_set = None, []  # the server's to make, not ours
    options = given_options(arguments)
    unknown = sorted(set(options) & LEFT_OUT)
    if unknown:
        raise ConfigurationError(f"the job server does not accept {', '.join(unknown)}. Received: a flag for it")
    if optimizer[0] is not None:
        options["worker_optimizer"] = {"class_name": optimizer[0], "config": optimizer[1]}
    elif optimizer[1]:
        raise ConfigurationError(f"`--optimizer-set` needs `--optimizer`. Received: {optimizer[1]} for none")
    if "class_weight" in options:
        options["class_weight"] = {str(label): weight for label, weight in options["class_weight"].items()}
    if "padding" in options:
        options["padding"] = padding_json(options["padding"])
    job = client.submit(
        arguments.model,
        arguments.rule,
        data=arguments.data,
        hyper_parameters=from_text(arguments.rule, arguments.set),
        name=arguments.name,
        tags=arguments.tags,
        checkpoint_every=arguments.checkpoint_every,
        early_stopping=values_of(arguments.early_stopping) or None,
        **options,
    )
    _report_sent(job, arguments)


def _predict(client: JobClient, arguments: argparse.Namespace) -> None:
    options = {
        "features_col": arguments.features and columns_of(arguments.features),
        "output_col": arguments.predictions and columns_of(arguments.predictions),
        "batch_size": arguments.batch_size,
        "batch_bytes": arguments.batch_bytes,
        "output_type": "vector" if arguments.vectors else None,
    }
    keywords = {name: value for name, value in options.items() if value is not None}
    model = arguments.model or client.job(arguments.job)
    keywords |= {"name": arguments.name, "tags": arguments.tags}
    _report_sent(client.predict(model, data=arguments.data, output=arguments.output, **keywords), arguments)


def _report_sent(job: RemoteJob, arguments: argparse.Namespace) -> None:
    _write(f"{job.id}\n")
    if arguments.wait is not None:
        job.wait(arguments.wait)


def _list(client: JobClient, arguments: argparse.Namespace) -> None:
    found = client.jobs(arguments.state, text=arguments.text, tag=arguments.tag)
    records = [job.record for job in islice(found, arguments.count)]
    for record in sorted(records, key=_SORTS[arguments.sort], reverse=arguments.sort in ("created", "duration")):
        numbers = f"{_duration(record)}  {_text(_last(record), 'epoch')}  {_text(_last(record), 'loss')}"
        words = " ".join([record["name"], *record["tags"], *([f"({why})"] if (why := _why(record)) else [])])
        words += f" {record['mlflow_run']}" if record["mlflow_run"] else ""
        began = _moment(record["created"])
        _write(f"{record['id']}  {record['state']:<10}  {began}  {numbers}  {record['user']:<12}  {words}\n")


def _last(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the numbers of a job's last epoch; nothing unless it is done."""
    numbers: Mapping[str, Any] = (record["summary"] or {}).get("last_epoch", {})
    return numbers


def _text(numbers: Mapping[str, Any], name: str) -> str:
    value = numbers.get(name)
    return f"{'-' if value is None else f'{value:.4g}':>8}"


def _why(record: Mapping[str, Any]) -> str:
    """Return why a job has ended before its last epoch, in one line."""
    return str(record["error"] or (record["summary"] or {}).get("stopped") or "").partition("\n")[0][:100]


def _duration(record: Mapping[str, Any]) -> str:
    seconds = _seconds(record)
    return f"{'-' if seconds is None else str(timedelta(seconds=round(seconds))):>8}"


def _seconds(record: Mapping[str, Any]) -> float | None:
    """Return how long a job has run; None if it has not begun."""
    if record["started"] is None:
        return None
    return float((record["ended"] or time.time()) - record["started"])


#: The orders of a list of jobs.
_SORTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "created": lambda record: record["created"],
    "duration": lambda record: -1.0 if (seconds := _seconds(record)) is None else seconds,
    "loss": lambda record: math.inf if (loss := _last(record).get("loss")) is None else loss,
    "name": lambda record: record["name"],
    "state": lambda record: record["state"],
}


def _resubmit(client: JobClient, arguments: argparse.Namespace) -> None:
    changes: dict[str, Any] = {}
    for name, value in values_of(arguments.set).items():
        *groups, last = name.split(".")
        place = changes
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    _write(_job(client, arguments).resubmit(**changes).id + "\n")


def _tokens(client: JobClient, _arguments: argparse.Namespace) -> None:
    for token in client.tokens():
        state = "revoked" if token["revoked"] else f"until {_moment(token['expires'])}" if token["expires"] else "valid"
        _write(f"{token['id']}  {_moment(token['created'])}  {token['user']:<12}  {state}  {token['note']}\n")


def _users(client: JobClient, _arguments: argparse.Namespace) -> None:
    for user in client.users():
        state = user["role"] if user["active"] else "removed"
        _write(f"{user['name']:<12}  {_moment(user['created'])}  {state}\n")


def _audit(client: JobClient, arguments: argparse.Namespace) -> None:
    for entry in islice(client.audit(), arguments.count):
        who = f"{entry['user']:<12}  {entry['address']:<15}"
        _write(f"{_moment(entry['time'])}  {who}  {entry['action']}  {entry['subject']}\n")


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _watch(client: JobClient, arguments: argparse.Namespace) -> None:
    job = client.job(arguments.job)
    before = None
    for row in job.watch(math.inf):
        if job.state != before:
            before = job.state
            _write(f"{before}\n")
        _write(_line(row))
    job.require_done()


def _line(row: dict[str, Any]) -> str:
    """Return a row of a job's progress as a line; nothing for one that says nothing to a reader."""
    clock = time.strftime("%H:%M:%S", time.localtime(row.get("time", 0.0)))
    if row.get("kind") == "event":
        return f"{clock}  {row['event']}: {row['text']}\n"
    if row.get("kind") == "tasks":
        return f"{clock}  task {row['done']} of {row['of']}\n"
    if row.get("kind") == "predicted":
        return f"{clock}  {row['rows']} rows\n"
    if row.get("kind") == "status" and row.get("loss") is not None:
        workers = row["joined"] - row["finished"]
        text = f"epoch {row['epochs']:.2f}, {row['samples']} samples, loss {row['loss']:.4f}, {workers} workers"
        return f"{clock}  {text}\n"
    return ""


def _job(client: JobClient, arguments: argparse.Namespace) -> RemoteJob:
    return client.job(arguments.job)


def _log(client: JobClient, arguments: argparse.Namespace) -> None:
    job = _job(client, arguments)
    for text in job.follow_log() if arguments.follow else [job.log()]:
        _write(text)


def _token(client: JobClient, arguments: argparse.Namespace) -> None:
    _write(client.new_token(arguments.note, days=arguments.days, user=arguments.user) + "\n")


def _write(text: str) -> None:
    """Print what a server says, without signs that a terminal would obey."""
    sys.stdout.write(re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "?", text))
    sys.stdout.flush()


_ACTIONS: dict[str, Any] = {
    "submit": _submit,
    "predict": _predict,
    "list": _list,
    "watch": _watch,
    "show": lambda client, arguments: _write(json.dumps(_job(client, arguments).record, indent=2) + "\n"),
    "log": _log,
    "resubmit": _resubmit,
    "cancel": lambda client, arguments: _job(client, arguments).cancel(),
    "remove": lambda client, arguments: _job(client, arguments).remove(),
    "fetch": lambda client, arguments: _job(client, arguments).save_model(arguments.out),
    "token": _token,
    "tokens": _tokens,
    "revoke": lambda client, arguments: client.revoke_token(arguments.token, alone=arguments.alone),
    "user": lambda client, arguments: client.add_user(arguments.name, arguments.role),
    "users": _users,
    "remove-user": lambda client, arguments: client.remove_user(arguments.name),
    "reinstate-user": lambda client, arguments: client.reinstate_user(arguments.name),
    "audit": _audit,
}
