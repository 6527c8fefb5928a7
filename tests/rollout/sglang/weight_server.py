"""A server of weights in a process of its own, for tests, which `serve` is the target of.

It answers the endpoints of an update over HTTP as SGLang does, and joins update groups with the same calls of torch,
but keeps the tensors that it gets instead of a model. GET /state says what happened; POST /behave breaks things:

  refuse: {endpoint: how many of its next calls are refused}
  refuse_status: HTTP status of refusals, 400 unless given; with 200 the body alone says so
  refuse_bucket, die_bucket, hang_bucket: number of the /update_weights_from_distributed call at which to do so
  version, info: what /model_info and /server_info say; session: whether one is open
"""

import hashlib
import json
import os
import signal
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous


def start(tp_size: int) -> dict[str, Any]:
    return {
        "version": "default",
        "info": {"tp_size": tp_size, "dp_size": 1, "pp_size": 1, "version": "0.5.23"},
        "calls": [],
        "paused": False,
        "session": False,
        "refuse": {},
        "buckets": 0,
    }


state: dict[str, Any] = {}
groups: dict[str, list[Any]] = {}
weights: list[dict[str, torch.Tensor]] = []
"""Of each tensor-parallel rank."""


def join(address: str, port: int, rank: int, size: int, name: str, backend: str) -> Any:
    """`init_custom_process_group` of SGLang, which registers the group in torch's table."""
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=timedelta(seconds=60)))
    store.set_timeout(timedelta(seconds=60))
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def join_again(address: str, port: int, rank: int, size: int, name: str) -> Any:
    """A second rank of the same process, which must not register the name once more."""
    store = dist.TCPStore(address, port, is_master=False)
    store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


def in_threads(jobs: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def init_group(body: dict[str, Any]) -> str | None:
    name = body["group_name"]
    where = (body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], name)
    jobs = [lambda: join(*where, body["backend"])]
    for rank in range(1, len(weights)):
        jobs.append(lambda rank=rank: join_again(where[0], where[1], where[2] + rank, where[3], name))
    groups[name] = in_threads(jobs)
    return None


def destroy_group(body: dict[str, Any]) -> str | None:
    if body["group_name"] not in groups:
        return "The group to be destroyed does not exist."
    dist.destroy_process_group(groups.pop(body["group_name"])[0])
    return None


def update(body: dict[str, Any]) -> str | None:
    if "/begin_weight_update" in ENDPOINTS and not state["session"]:
        return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
    if body["group_name"] not in groups:
        return f"Group {body['group_name']} not in {list(groups)}."
    state["buckets"] += 1
    if state["buckets"] == state.get("die_bucket"):
        os.kill(os.getpid(), signal.SIGKILL)
    if state["buckets"] == state.get("hang_bucket"):
        time.sleep(600)
    in_threads([lambda rank=rank: receive(body, rank) for rank in range(len(weights))])
    if state["buckets"] == state.get("refuse_bucket"):
        return "Failed to update parameter online: shapes differ."
    state["version"] = body.get("weight_version", state["version"])
    return None


def receive(body: dict[str, Any], rank: int) -> None:
    works = []
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        group = groups[body["group_name"]][rank]
        works.append(dist.broadcast(tensor, 0, group=group, async_op=True) if not rank else group.broadcast(tensor, 0))
        weights[rank][name] = tensor
    for work in works:
        work.wait()


def update_from_disk(body: dict[str, Any]) -> str | None:
    path = Path(body["model_path"])
    if not (path / "config.json").is_file():
        return f"no model in {path}"
    weights[0] = {
        name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    state["version"] = body["weight_version"]
    return None


def begin(body: dict[str, Any]) -> str | None:
    if state["session"]:
        return "a weight-update session is already open; call end_weight_update() first"
    state["session"] = True
    return None


def end(body: dict[str, Any]) -> str | None:
    if not state["session"]:
        return "no weight-update session is open; call begin_weight_update() first"
    state["session"] = False
    return None


def switch(paused: bool) -> str | None:
    state["paused"] = paused
    return None


ENDPOINTS: dict[str, Any] = {
    "/pause_generation": lambda body: switch(True),
    "/continue_generation": lambda body: switch(False),
    "/flush_cache": lambda body: None if state["paused"] else "Flush cache failed.",
    "/abort_request": lambda body: None,
    "/init_weights_update_group": init_group,
    "/destroy_weights_update_group": destroy_group,
    "/update_weights_from_distributed": update,
    "/update_weights_from_disk": update_from_disk,
}
OF_SESSIONS: dict[str, Any] = {"/begin_weight_update": begin, "/end_weight_update": end}


def digest(tensor: torch.Tensor) -> list[Any]:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/model_info":
            return self.answer(200, {"weight_version": state["version"]})
        if self.path == "/server_info":
            return self.answer(200, state["info"])
        digests = [{name: digest(tensor) for name, tensor in rank.items()} for rank in weights]
        self.answer(200, {**state, "groups": list(groups), "weights": digests})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path == "/behave":
            state.clear()
            state.update({**start(len(weights)), **body})
            for name in list(groups):
                destroy_group({"group_name": name})
            return self.answer(200, {})
        state["calls"].append([self.path, body])
        if self.path not in ENDPOINTS:
            return self.answer(404, {"detail": "Not Found"})
        refused = state["refuse"].get(self.path, 0)
        state["refuse"][self.path] = refused - 1
        try:
            message = "refused on purpose" if refused > 0 else ENDPOINTS[self.path](body)
        except Exception as error:
            message = f"Failed: {error}"
        status = 200 if message is None else state.get("refuse_status", 400)
        if self.path == "/flush_cache" and status != 200:
            return self.answer(status, message or "Cache flushed.")
        self.answer(status, {"success": message is None, "message": message or "Success"})

    def answer(self, status: int, body: Any) -> None:
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


def serve(port: Connection, session: bool, tp_size: int) -> None:
    """Serves until the process ends, and sends the port that it listens on."""
    torch.set_num_threads(1)
    weights.extend({} for _ in range(tp_size))
    state.update(start(tp_size))
    if session:
        ENDPOINTS.update(OF_SESSIONS)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.serve_forever()
