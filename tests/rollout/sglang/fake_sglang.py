"""An HTTP server for tests that answers as SGLang does, in the words of recorded answers, and fails
on demand.

Its model is a rule: the next token follows from the tokens before it, and the log-prob from token
and weights. A test therefore knows every sample, whoever samples it and however often. Weights are
received as in SGLang, and kept.
"""

import asyncio
import base64
import copy
import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from tests.checkpoints import CHARACTERS

RECORDED = Path(__file__).parent / "recorded"
STOP = 2
FIRST, LAST = 3, 63
LAYERS, EXPERTS = 2, 8
REFUSED = (400, {"success": False, "message": "refused on purpose"})
JOIN_TIMEOUT = timedelta(seconds=60)


def recorded(name):
    """The body of an answer of the real server."""
    return json.loads((RECORDED / f"{name}.json").read_text())["body"]


def next_token(ids):
    """What the model says after these tokens; it stops now and then."""
    mixed = (sum(ids) * 37 + ids[-1] * 11 + len(ids) * 5) % 211
    return STOP if mixed < 6 else FIRST + mixed % (LAST - FIRST + 1)


def log_prob(token, version):
    """Of a token under some weights; exact in binary, as all of it is."""
    return -(1 + token % 8) / 4 - version / 256


def chosen_experts(token, version):
    """The two experts of each layer that a token is routed to under some weights."""
    firsts = [(token + 3 * layer + version) % EXPERTS for layer in range(LAYERS)]
    return [[first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS] for first in firsts]


def text_of(ids):
    """The text of tokens, as the tokenizer of the tests decodes them."""
    return "".join(CHARACTERS[token - FIRST] for token in ids if token != STOP)


def sampled_from(token):
    """The tokens that could be sampled where a token was."""
    return [token, token - 1, *range(token % 3)] if token > 3 else [token]


def likeliest(token, version, count):
    """SGLang's entries of the likeliest tokens where a token was sampled: those after it, and one
    without a chance."""
    entries = [[log_prob(each, version), each, None] for each in range(token, token + count - 1)]
    return [*entries, [torch.finfo(torch.float32).min, FIRST - 1, None]]


def continuation(ids, limit):
    """The response that the model gives to a prompt."""
    response = []
    while len(response) < limit and (not response or response[-1] != STOP):
        response.append(next_token([*ids, *response]))
    return response


class FakeSGLang:
    """One server. Fields may be set from the test at any time."""

    address = "127.0.0.1"
    key: str | None = None
    pace = 0.0
    """Seconds that each token takes."""
    deaf = False
    """Whether aborts are heard and not followed."""

    def __init__(self, loop):
        self.weight_version = "default"
        self.version = 0
        self.healthy = True
        self.stop_after = None
        """Tokens after which every request waits until this is None or more."""
        self.faults = deque()
        """What becomes of the next requests: a status, drop, hang, or a function that spoils the
        answer."""
        self.replies = {}
        """Status and body of the next answers of an endpoint."""
        self.hanging = set()
        """Endpoints whose requests wait, and are dropped when the endpoint is removed."""
        self.dies_at = {}
        """Endpoints at whose next request the server dies: "before" or "after" it takes effect."""
        self.freezes_at = set()
        """Endpoints at whose next request the server stops, as with SIGSTOP; see `thaw`."""
        self.lost_answers = set()
        """Endpoints whose requests take effect, but whose connections break before the answer."""
        self.requests = []
        self.posts = []
        """Endpoints and bodies of the other POST requests."""
        self.gets = []
        self.headers = []
        self.workers = []
        self.most_at_once = self.at_once = 0
        self.aborted = set()
        self.live = set()
        self.held = {}
        """Tokens of the requests that wait at `stop_after`, by id."""
        self.info = {"enable_return_routed_experts": True, "sampling_mask_max_tokens": 4096}
        """Fields of /server_info that differ from the recorded one."""
        self.paused = self.session = False
        self.tensors = []
        """The weights of each tensor-parallel rank."""
        self.adapters = {}
        """Directories of the loaded LoRA adapters, by name."""
        self.groups = {}
        self.buckets = 0
        self.bucket_faults = {}
        """What happens at a bucket, by its number from 1 on: refuse, die or hang."""
        self._loop = loop
        self._server = None
        self._open = set()
        self._dead = False
        self._thawed = asyncio.Event()
        self._handlers = set()
        self.port = 0
        self._do(self._listen())

    @property
    def url(self):
        return f"http://{self.address}:{self.port}"

    def die(self):
        """As with SIGKILL: connections break, nobody listens."""
        self._do(self._die())

    def thaw(self):
        """As with SIGCONT: the requests that arrived meanwhile take effect, in their order."""
        self._loop.call_soon_threadsafe(self._thawed.set)

    def come_back(self, weight_version="default"):
        """A new process at the same address."""
        self.weight_version, self.version = weight_version, 0
        self.paused, self.healthy, self.session = False, True, False
        self.adapters = {}
        self._do(self._listen())

    def count(self, path):
        """Calls of a path so far."""
        return self.gets.count(path) + self.called.count(path.removeprefix("/"))

    @property
    def called(self):
        return [path.removeprefix("/") for path, _ in self.posts]

    def bodies(self, path):
        return [body for called, body in self.posts if called == path]

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self):
        self._dead = False
        self._thawed.set()
        self._server = await asyncio.start_server(self._connected, self.address, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _die(self):
        self._dead = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        for task in self._handlers - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*self._handlers - {asyncio.current_task()}, return_exceptions=True)
        for name in list(self.groups):
            self._leave(name)
        self.at_once = 0

    async def _connected(self, reader, writer):
        # The system may have accepted the connection before the server died.
        if self._dead:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self._open.add(writer)
        try:
            while await self._one_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)
            self._open.discard(writer)
            writer.transport.abort()

    async def _one_request(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
            if name
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.headers.append(headers)
        answer = await self._answer(method, path, json.loads(body) if body else {}, headers)
        if answer is None:
            return False
        return await self._send(writer, path, *answer)

    async def _send(self, writer, path, status, content):
        """Writes an answer; returns whether the connection stays open."""
        text = content if isinstance(content, str) else json.dumps(content)
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}".encode()
        )
        await writer.drain()
        return True

    async def _answer(self, method, path, body, headers):
        if path in self.freezes_at:
            self.freezes_at.remove(path)
            self._thawed.clear()
        await self._thawed.wait()
        moment = self.dies_at.pop(path, None)
        answer = None
        if moment != "before":
            answer = await self._answer_or_fail(method, path, body, headers)
        if moment is not None:
            await self._die()
            return None
        return answer

    async def _answer_or_fail(self, method, path, body, headers):
        if path == "/generate":
            return await self._generate_or_fail(body)
        if method == "POST":
            self.posts.append((path, body))
        else:
            self.gets.append(path)
        if path in self.hanging:
            while path in self.hanging:
                await asyncio.sleep(0.002)
            return None
        if self.replies.get(path):
            return self.replies[path].pop(0)
        if path == "/health":
            return (200, "") if self.healthy and not self.paused else (503, "")
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return 401, recorded("error_401")
        if method != "POST":
            return self._description(path)
        answer = await self._control(path, body)
        return None if path in self.lost_answers else answer

    def _description(self, path):
        """The answer to a GET."""
        if path == "/model_info":
            return 200, {**recorded("model_info"), "weight_version": self.weight_version}
        if path == "/server_info":
            return 200, {**recorded("server_info"), **self.info}
        if path == "/v1/models":
            models = [{"id": name, "parent": "model"} for name in self.adapters]
            return 200, {"data": [{"id": "model", "parent": None}, *models]}
        if path == "/workers" and self.workers:
            return 200, {"workers": [{"url": worker.url} for worker in self.workers]}
        return 404, recorded("error_404")

    async def _control(self, path, body):  # noqa: C901
        if path == "/faults":
            self.faults.extend(body["faults"])
            return 200, ""
        if path == "/abort_request":
            self.aborted |= self.live if body.get("abort_all") else {body["rid"]}
            return 200, ""
        if path == "/flush_cache":
            return (200, "Cache flushed.") if self.paused else (400, "Flush cache failed.")
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        elif path in ("/begin_weight_update", "/end_weight_update"):
            opens = path == "/begin_weight_update"
            if self.session == opens:
                return 400, recorded("begin_weight_update_open") if opens else REFUSED[1]
            self.session = opens
        elif path == "/update_weights_from_disk":
            files = Path(body["model_path"]).glob("*.safetensors") if "model_path" in body else ()
            self.tensors = [
                {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}
            ]
            self.weight_version, self.version = body["weight_version"], int(body["weight_version"])
        elif path == "/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {"success": True}
        elif path == "/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
            return 200, {"success": True}
        elif path == "/init_weights_update_group":
            await self._join(body)
        elif path == "/destroy_weights_update_group":
            if not self._leave(body["group_name"]):
                return REFUSED
        elif path == "/update_weights_from_distributed":
            return await self._receive(body)
        else:
            return 404, recorded("error_404")
        return 200, recorded(path[1:])

    async def _join(self, body):
        """Joins a group, the first rank as `init_custom_process_group` of SGLang does."""
        address, port, name, size = (
            body[f] for f in ("master_address", "master_port", "group_name", "world_size")
        )

        def join(rank):
            if rank != body["rank_offset"]:  # a process registers a name only once
                store = PrefixStore(name, dist.TCPStore(address, port, is_master=False))
                store = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
                return dist.ProcessGroupGloo(store, rank, size, JOIN_TIMEOUT)
            store, _, _ = next(
                rendezvous(f"tcp://{address}:{port}", rank, size, timeout=JOIN_TIMEOUT)
            )
            store.set_timeout(JOIN_TIMEOUT)
            backend, store = Backend(body["backend"]), PrefixStore(name, store)
            group, _ = _new_process_group_helper(
                size, rank, [], backend, store, name, timeout=JOIN_TIMEOUT
            )
            _world.pg_group_ranks[group] = {i: i for i in range(size)}
            return group

        ranks = range(body["rank_offset"], size)
        self.groups[name] = await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in ranks))
        self.tensors = [{} for _ in ranks]

    def _leave(self, name):
        groups = self.groups.pop(name, [])
        if groups:
            dist.destroy_process_group(groups[0])
        return bool(groups)

    async def _receive(self, body):
        """Receives a bucket of weights."""
        if not self.session or body["group_name"] not in self.groups:
            return REFUSED
        self.buckets += 1
        fault = self.bucket_faults.get(self.buckets)
        if fault == "die":
            await self._die()
            return None
        if fault == "hang":
            await asyncio.sleep(3600)

        def receive(group, tensors):
            shapes = zip(body["dtypes"], body["shapes"], strict=True)
            new = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
            for work in [group.broadcast(tensor, 0) for tensor in new]:
                work.wait()
            tensors.update(zip(body["names"], new, strict=True))

        groups = self.groups[body["group_name"]]
        await asyncio.gather(
            *(asyncio.to_thread(receive, *rank) for rank in zip(groups, self.tensors, strict=True))
        )
        if fault == "refuse":
            return REFUSED
        if "weight_version" in body:  # of the last bucket
            self.weight_version, self.version = body["weight_version"], int(body["weight_version"])
        return 200, recorded("update_weights_from_distributed")

    async def _generate_or_fail(self, body):
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return fault, recorded("error_400")
        if fault == "drop":
            return None
        if fault == "hang":
            await asyncio.sleep(3600)
        if body.get("lora_path") not in (None, *self.adapters):
            return 400, {"error": {"message": "Got LoRA adapter that has never been loaded"}}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        rid = body.get("rid", f"no-id-{len(self.requests)}")
        if rid in self.live:
            self.at_once -= 1
            return 400, recorded("error_duplicate_rid")
        self.live.add(rid)
        try:
            if self.workers:
                return await self._hand_on(body)
            answer = (
                self._scores(body)
                if body["sampling_params"]["max_new_tokens"] == 0
                else await self._sample(body)
            )
        finally:
            self.at_once -= 1
            self.live.discard(rid)
            self.held.pop(rid, None)
        return (200, fault(answer)) if callable(fault) else (200, answer)

    async def _hand_on(self, body):
        """A router: to one of its servers that is there, in turn."""
        there = [worker for worker in self.workers if worker._server is not None]
        if not there:
            return 503, "no server"
        worker = there[len(self.requests) % len(there)]
        asked = asyncio.ensure_future(worker._generate_or_fail(body))
        worker._handlers.add(asked)
        try:
            return await asked or (502, "the server broke the connection")
        except asyncio.CancelledError:
            if asked.cancelled():
                return 502, "the server died"
            raise
        finally:
            worker._handlers.discard(asked)

    async def _sample(self, body):
        limit, response, versions = body["sampling_params"]["max_new_tokens"], [], []
        finish = {"type": "length", "length": limit}
        while len(response) < limit:
            waiting = True
            while waiting:
                await self._thawed.wait()
                await asyncio.sleep(
                    self.pace or (0.0005 if self.paused or self.stop_after is not None else 0)
                )
                if body["rid"] in self.aborted and not self.deaf:
                    return self._formed(
                        body, response, versions, {"type": "abort", "message": "Aborted"}
                    )
                waiting = self.stop_after is not None and len(response) >= self.stop_after
                if waiting:
                    self.held[body["rid"]] = len(response)
                waiting = waiting or self.paused
            token = next_token([*body["input_ids"], *response])
            response.append(token)
            versions.append(self.version)
            matched = [
                stop
                for stop in body["sampling_params"].get("stop", [])
                if stop in text_of(response)
            ]
            if (
                token == STOP
                or token in body["sampling_params"].get("stop_token_ids", [])
                or matched
            ):
                finish = {"type": "stop", "matched": [*matched, token][0]}
                break
        return self._formed(body, response, versions, finish)

    def _formed(self, body, response, versions, finish):
        answer = recorded("generate_length")
        meta = answer["meta_info"]
        values = [
            log_prob(token, version) for token, version in zip(response, versions, strict=True)
        ]
        answer["output_ids"], meta["id"], meta["finish_reason"] = response, body["rid"], finish
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(values, response, strict=True)
        ]
        meta["completion_tokens"] = meta["output_token_logprobs_length"] = len(response)
        if count := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                likeliest(*each, count) for each in zip(response, versions, strict=True)
            ]
        if body.get("return_sampling_mask") and self.info["sampling_mask_max_tokens"]:
            meta["output_token_sampling_mask"] = [sampled_from(token) for token in response]
            meta["output_token_sampling_logprobs"] = [value / 2 for value in values]
        meta["weight_version"] = self.weight_version
        meta["weight_versions"] = list(self._spans(versions))
        if self.info["enable_return_routed_experts"] and body.get("return_routed_experts"):
            # As after a retraction: by the weights that it has when it answers.
            fed = [*body["input_ids"], *response][body["routed_experts_start_len"] : -1]
            rows = np.array([chosen_experts(token, self.version) for token in fed], dtype="<i4")
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return answer

    def _spans(self, versions):
        cuts = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
        for start, end in pairwise([0, *cuts, len(versions)]):
            version = versions[start] if versions else self.version
            name = (
                self.weight_version
                if version == 0 and not self.weight_version.isdecimal()
                else str(version)
            )
            yield {"version": name, "start": start, "end": end}

    def _scores(self, body):
        answer, (first, *rest) = recorded("score"), body["input_ids"]
        entries = [[log_prob(token, self.version), token, None] for token in rest]
        answer["meta_info"]["input_token_logprobs"] = [[None, first, None], *entries]
        return answer


@contextmanager
def servers_of(kind, count):
    """Some servers of a class, on a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers = [kind(loop) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.die()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


fake_servers = partial(servers_of, FakeSGLang)


def spoiled(edit):
    """A fault that edits a copy of the answer in place."""

    def spoil(answer):
        answer = copy.deepcopy(answer)
        edit(answer)
        return answer

    return spoil


def wait_until(condition):
    """Waits for an event, from a thread that may block."""
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def when(condition, act):
    """Does something on another thread as soon as something has happened, while the caller waits
    elsewhere."""

    def run():
        wait_until(condition)
        act()

    threading.Thread(target=run, daemon=True).start()
