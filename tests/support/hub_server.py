# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A small Hub on 127.0.0.1, with the routes that huggingface_hub uses to push and to load models, and with faults."""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_the_test_user"
USER = "tester"


class Repository:
    """Commits are whole snapshots, `{path: content}`; a branch names one of them."""

    def __init__(self, private: bool):
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {}, "first")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        text = json.dumps([message, len(self.commits), sorted((path, _sha256(data)) for path, data in files.items())])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class HubServer(ThreadingHTTPServer):
    """
    The server's state. `faults` holds what goes wrong, each for as many requests as its number says:

    - "cut download": a GET of a weight file ends in its middle;
    - "cut upload": the connection closes while a weight file is sent;
    - "refuse commit": the commit is answered by an error;
    - "slow": a weight file comes in pieces with pauses.

    `moves` holds the commits that a repository's branch `main` moves to when a file is downloaded, by the repository's
    name and the file's path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.moves: dict[tuple[str, str], str] = {}
        self.requests: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def happens(self, fault: str) -> bool:
        """Whether a fault is due, which then is one less."""
        self.faults[fault] = self.faults.get(fault, 0) - 1
        return self.faults[fault] >= 0

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are what the tests are about: no tracebacks."""


@contextmanager
def running_hub():
    """A Hub that runs in a thread of this process."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_weights(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((method, path))
        for wanted, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in wanted:
                return action(self, *match.groups())
        self._fail(404, "EntryNotFound", f"no route for {method} {path}")

    # Answers.

    def _answer(self, data: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        self._answer(json.dumps({"error": message}).encode(), status, headers)

    # What requests have in common.

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _knows_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, write: bool = False) -> Repository | None:
        """The repository, or `None` after an answer that says that this user may not see or change it."""
        repository = self.server.repositories.get(name)
        hidden = repository is None or repository.private
        if (hidden or write) and not self._knows_user():
            self._fail(401, "RepoNotFound", "Repository not found, or no right to see it")
            return None
        if repository is None:
            self._fail(404, "RepoNotFound", "Repository not found")
        return repository

    def _revision(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self._repository(name)
        if repository is None:
            return None
        sha = repository.sha(revision)
        if sha is None:
            self._fail(404, "RevisionNotFound", f"Revision {revision} not found")
            return None
        return repository, sha

    # Routes.

    def set_faults(self) -> None:
        """Not one of the Hub's: a client process says what goes wrong next."""
        self.server.faults = json.loads(self._body())
        self._json({})

    def who_am_i(self) -> None:
        if not self._knows_user():
            return self._fail(401, "Unauthorized", "Invalid username or password.")
        self._json({"name": USER, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        wanted = json.loads(self._body())
        if not self._knows_user():
            return self._fail(401, "Unauthorized", "Invalid username or password.")
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        there = name in self.server.repositories
        if not there:
            self.server.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        self._json({"url": f"{self.server.endpoint}/{name}", "name": name}, 409 if there else 200)

    def validate(self) -> None:
        self._body()
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        wanted = json.loads(self._body())
        if self._repository(name, write=True) is not None:
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": file["path"], "uploadMode": modes[_is_weights(file["path"])], "shouldIgnore": False}
                for file in wanted["files"]
            ]
            self._json({"files": files})

    def lfs_batch(self, name: str) -> None:
        wanted = json.loads(self._body())
        if self._repository(name, write=True) is not None:
            objects = []
            for each in wanted["objects"]:
                upload = {"upload": {"href": f"{self.server.endpoint}/lfs/{each['oid']}", "header": {}}}
                # Without actions: the Hub has it.
                objects.append(each if each["oid"] in self.server.blobs else {**each, "actions": upload})
            self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if self.server.happens("cut upload"):
            self.rfile.read(100)
            self.connection.close()
            return
        data = self._body()
        if _sha256(data) != oid:
            return self._fail(400, "BadRequest", "the sha256 is another one")
        self.server.blobs[oid] = data
        self._answer()

    def commit(self, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        repository = self._repository(name, write=True)
        if repository is None:
            return
        if revision not in repository.branches:
            return self._fail(404, "RevisionNotFound", f"Revision {revision} not found")
        if self.server.happens("refuse commit"):
            return self._fail(400, "BadRequest", "the commit was refused")
        files, message = dict(repository.files(revision)), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.blobs:
                    return self._fail(400, "BadRequest", f"{value['path']} was not uploaded")
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = repository.commit(revision, files, message)
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.server.endpoint}/{name}/commit/{sha}"})

    def branch(self, name: str, branch: str) -> None:
        wanted = json.loads(self._body() or b"{}")
        repository = self._repository(name, write=True)
        if repository is not None:
            there = branch in repository.branches
            if not there:
                repository.branches[branch] = repository.sha(wanted.get("startingPoint", "main"))
            self._json({}, 409 if there else 200)

    def info(self, name: str, revision: str | None = None) -> None:
        found = self._revision(name, revision or "main")
        if found is not None:
            repository, sha = found
            siblings = [{"rfilename": path, "size": len(data)} for path, data in repository.commits[sha].items()]
            self._json({"id": name, "modelId": name, "sha": sha, "private": repository.private, "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        found = self._revision(name, revision)
        if found is not None:
            files = found[0].commits[found[1]]
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in sorted(files.items())
                ]
            )

    def resolve(self, name: str, revision: str, path: str) -> None:
        found = self._revision(name, revision)
        if found is None:
            return
        repository, sha = found
        data = repository.commits[sha].get(path)
        if data is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            return self._answer(b"", 404, headers)
        if self.command == "GET" and (name, path) in self.server.moves:
            repository.branches["main"] = self.server.moves.pop((name, path))
        etag = _sha256(data) if _is_weights(path) else hashlib.sha1(data).hexdigest()
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        first = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        whole, status = len(data), 200
        if first and self.command == "GET":
            data, status = data[int(first[1]) :], 206
            headers["Content-Range"] = f"bytes {first[1]}-{whole - 1}/{whole}"
        if self.command == "GET" and _is_weights(path):
            if self.server.happens("cut download"):
                self._answer(data[: len(data) // 2], status, {**headers, "Content-Length": str(len(data))})
                self.connection.close()
                return
            if self.server.happens("slow"):
                self._answer(b"", status, {**headers, "Content-Length": str(len(data))})
                for start in range(0, len(data), 1 + len(data) // 8):
                    self.wfile.write(data[start : start + 1 + len(data) // 8])
                    self.wfile.flush()
                    time.sleep(0.1)
                return
        self._answer(data, status, headers)


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    (("POST",), "/faults", _Handler.set_faults),
    (("GET",), "/api/whoami-v2", _Handler.who_am_i),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate),
    (("POST",), rf"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), r"/lfs/(\w+)", _Handler.lfs_put),
    (("POST",), rf"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    (("POST",), rf"/api/models/{_NAME}/branch/(.+)", _Handler.branch),
    (("GET",), rf"/api/models/{_NAME}", _Handler.info),
    (("GET",), rf"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    (("GET",), rf"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
