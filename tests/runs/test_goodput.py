"""Where the time of a run goes: every second is counted once, over all starts."""

import json
import re
import time

from jaxformer.runs.goodput import PARTS, Goodput, program_began


def test_every_second_is_counted_once(tmp_path):
    began = time.monotonic()
    account = Goodput(tmp_path / "goodput.json", began)
    for part in ("start", "compile", "step", "data", "step", "save"):
        time.sleep(0.01)
        account.lap(part)
    assert abs(sum(account.seconds.values()) - (account._last - began)) < 1e-9
    assert all(account.seconds[part] >= 0.01 for part in ("start", "compile", "data", "save"))
    assert account.seconds["step"] >= 0.02 and account.seconds["recomputed"] == 0


def test_starts_add_up_and_a_damaged_account_is_begun_again(tmp_path):
    path = tmp_path / "goodput.json"
    for count in (1, 2, 3):
        account = Goodput(path, time.monotonic() - 2)
        account.lap("step")
        account.save()
        assert len(json.loads(path.read_text())["starts"]) == count
    summary = re.match(r"goodput 100 % of \d+ s in 3 starts: step ([\d.]+), ", account.summary())
    assert summary is not None, account.summary()
    assert float(summary[1]) >= 6.0  # two seconds a start, and what the lines above took
    path.write_text("{torn")
    assert Goodput(path, time.monotonic()).earlier == []
    assert all(part in account.summary() for part in PARTS)


def test_the_program_began_before_now():
    assert 0 <= time.monotonic() - program_began() < 24 * 3600
