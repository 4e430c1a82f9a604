"""Clients that leave, in every way and at every time, that never read, that come all at once: their blocks are free again."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from robustness_e2e import processes


def request(**fields: Any) -> bytes:
    """A request of 500 tokens as it goes over the wire."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(server: Any, **options: int) -> socket.socket:
    url = httpx.URL(server.url)
    made = socket.socket()
    for option, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    made.settimeout(30)
    made.connect((url.host, url.port))
    return made


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def number(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"rabbet:{name}{{"))


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}], ids=str)
def test_a_client_that_leaves_while_its_request_runs(
    server: Any, client: httpx.Client, wait_until: Callable[..., None], idle: Callable[[], None],
    leave: Callable[[socket.socket], None], fields: dict[str, Any],
) -> None:  # fmt: skip
    connection = connect(server)
    connection.sendall(request(**fields))
    if fields.get("stream"):
        assert connection.recv(12) == b"HTTP/1.1 200"
    else:
        wait_until(lambda: number(client, "num_requests_running") > 0, "the request runs")
    leave(connection)
    idle()


def test_two_hundred_clients_come_and_leave_at_once(
    server: Any, client: httpx.Client, neighbours: Callable[[], Any], idle: Callable[[], None]
) -> None:
    """Of most nothing runs yet: they leave from the queue."""
    with neighbours():
        crowd = [connect(server) for _ in range(200)]
        for number, connection in enumerate(crowd):
            connection.sendall(request(stream=number % 2 == 0, prompt=[number % 250] * (1 + number)))
        for number, connection in enumerate(crowd):
            (close if number % 3 else reset)(connection)
    idle()
    assert client.get("/health").status_code == 200


def test_a_client_that_never_reads_holds_up_nobody_and_no_seat(
    server: Any, client: httpx.Client, neighbours: Callable[[], Any], idle: Callable[[], None]
) -> None:
    """Its eight outputs are made to their end although nothing of them can be sent; what waits is bounded by them."""
    silent = connect(server, SO_RCVBUF=2048)
    with neighbours():
        silent.sendall(request(stream=True, n=8, logprobs=20))
        assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 3}).status_code == 200
    idle()
    assert number(client, "num_preemptions_total") > 0, "eight times 500 tokens do not fit at once"
    silent.close()
    idle()


def test_a_request_in_pieces_with_nothing_behind_it_is_no_request(
    server: Any, client: httpx.Client, idle: Callable[[], None]
) -> None:
    whole = request()
    for cut in (1, 20, len(whole) // 2, len(whole) - 1):
        connection = connect(server)
        connection.sendall(whole[:cut])
        connection.close()
    idle()
    assert client.get("/health").status_code == 200


def resident_kib(pids: list[int]) -> int:
    sizes = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return sum(int(size.split()[1]) for size in sizes)


def test_a_crowd_that_streams_breaks_off_and_errs_leaves_nothing(
    server: Any, client: httpx.Client, neighbours: Callable[[], Any], idle: Callable[[], None]
) -> None:
    """Forty clients, a fifth of which leaves, a tenth errs: each request has one end, and memory does not grow with them."""
    pids = [server.process.pid, *(pid for pid, parent, _ in processes() if parent == server.process.pid)]
    problems: list[str] = []

    def life(number: int, rounds: int) -> None:
        dice = random.Random(number)
        url = f"{server.url}/v1/completions"
        with httpx.Client(timeout=60) as session:
            for _ in range(rounds):
                kind, tokens = dice.random(), dice.randint(1, 30)
                body: dict[str, Any] = {"prompt": [dice.randrange(257) for _ in range(dice.randint(1, 60))]}
                body |= {"max_tokens": tokens, "ignore_eos": True, "stream": True, "user": str(dice.random())}
                body |= {"cache_salt": str(dice.random()), "request_id": "same", f"field{number % 7}": 1}
                if kind < 0.1:
                    if session.post(url, json={**body, "n": 0}).status_code != 400:
                        problems.append("an error that is none")
                    continue
                with session.stream("POST", url, json={**body, "return_token_ids": True}) as answer:
                    ids: list[int] = []
                    ends = 0
                    for line in answer.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        if kind < 0.3 and ids:
                            break
                        (choice,) = json.loads(line[6:])["choices"]
                        ids += choice["token_ids"]
                        ends += choice["finish_reason"] is not None
                    else:
                        if (len(ids), ends) != (tokens, 1):
                            problems.append(f"{len(ids)} of {tokens} tokens and {ends} ends")

    def crowd(rounds: int) -> None:
        threads = [threading.Thread(target=life, args=(number, rounds)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    crowd(2)
    idle()
    lines, before = len(client.get("/metrics").text.splitlines()), resident_kib(pids)
    with neighbours():
        crowd(8)
    idle()
    assert not problems, problems[:3]
    assert len(client.get("/metrics").text.splitlines()) == lines, "labels grow with clients"
    assert resident_kib(pids) - before < 32 * 1024, "memory grows with requests"
