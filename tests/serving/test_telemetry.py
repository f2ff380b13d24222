"""/metrics and /health, as Prometheus and a supervisor read them."""

import json
import re
import urllib.error
import urllib.request

from serving_server import MODEL, Running

from hf_specdec.serving.telemetry import Telemetry

SAMPLE = re.compile(r'^([a-z_]+:[a-z_0-9]+)\{((?:[a-z_]+="[^"]*",?)*)\} ([0-9.e+-]+)$')


def get(running: Running, path: str) -> tuple[str, str]:
    with urllib.request.urlopen(running.url + path, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def samples(text: str) -> dict[tuple[str, str], float]:
    """Name and labels -> value; fails for a line that is none."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match is not None, line
            found[match[1], match[2]] = float(match[3])
    return found


def test_counts_grow_by_what_answers_say(running):
    def total(name: str, labels: str = "") -> float:
        key = f'model_name="{MODEL}"{labels}'
        return values.get((f"hf_specdec:{name}", key), 0.0)

    values = samples(get(running, "/metrics")[0])
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [total(f"spec_decode_num_{name}_total") for name in names]
    answer = running.client.completions.create(
        model=MODEL, prompt=["hello", "what is it"], temperature=0, max_tokens=20
    )
    text, kind = get(running, "/metrics")
    values = samples(text)
    usage = answer.usage.speculation  # type: ignore[union-attr]
    grown = [total(f"spec_decode_num_{n}_total") - b for n, b in zip(names, before, strict=True)]
    assert grown == [usage[f"num_{name}"] for name in names]
    assert grown[2] > 0
    assert kind.startswith("text/plain; version=0.0.4")
    for position, count in enumerate(usage["num_accepted_tokens_per_pos"]):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert total(name, f',position="{position}"') >= count
    assert total("generation_tokens_total") >= answer.usage.completion_tokens
    assert total("num_requests_running") == total("num_requests_waiting") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        count = total(f"{name}_count")
        buckets = [v for (n, _), v in values.items() if n == f"hf_specdec:{name}_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == count >= 2
        assert 0 < total(f"{name}_sum") < 60 * count
    assert total("batch_size_sum") >= 2


def test_every_metric_is_announced_once(running):
    text, _ = get(running, "/metrics")
    announced = re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)$", text, re.M)
    names = [name for name, _ in announced]
    assert len(names) == len(set(names)) == len(re.findall(r"^# HELP", text, re.M))
    for (name, _), _value in samples(text).items():
        assert re.sub("_(bucket|sum|count)$", "", name) in names or name in names


def test_errors_are_counted_by_status(running):
    key = ("hf_specdec:request_errors_total", f'model_name="{MODEL}",status="404"')
    before = samples(get(running, "/metrics")[0]).get(key, 0)
    request = urllib.request.Request(
        running.url + "/v1/completions",
        json.dumps({"model": "other", "prompt": "x"}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=10)
    except urllib.error.HTTPError as error:
        assert error.code == 404
    assert samples(get(running, "/metrics")[0])[key] == before + 1


def test_names_and_labels():
    text = Telemetry('a "name"', prefix="vllm").text()
    assert 'vllm:spec_decode_num_drafts_total{model_name="a \\"name\\""} 0' in text.splitlines()


def test_the_log_has_a_line_when_something_was_drafted(running):
    telemetry = running.server._application.telemetry
    running.client.completions.create(model=MODEL, prompt="hello", temperature=0, max_tokens=8)
    line = telemetry.log_line()
    assert re.search(r"Mean acceptance length: \d\.\d\d, .*Accepted: [1-9]\d* tokens", line)
    assert telemetry.log_line() is None


def test_health(running):
    state = json.loads(get(running, "/health")[0])
    assert state == {"status": "ok", "running": 0, "waiting": 0}
