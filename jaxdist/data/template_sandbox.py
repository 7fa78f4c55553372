"""Render chat templates, which are untrusted programs, in a child process with limits.

Jinja's sandbox keeps a template from accessing Python, but does not limit time or memory. This file
is also the program of the child, so it imports nothing of jaxdist.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

CPU_S = 1.0
"""Limit of CPU time for one conversation; common templates take less than a millisecond."""

MEMORY_BYTES = 512 << 20
"""Limit of the child's address space."""

TEXT_CHARACTERS = 16 << 20
"""Longest text of one conversation."""

_WAIT_S = 60.0  # for an answer on a busy machine; the child's own limits apply first


class TemplateFailed(ValueError):
    """Raised for an error of a template; `line` is the line of a syntax error, else 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class Template:
    """A compiled Jinja template of the kind that Hugging Face uses, in its own process."""

    def __init__(self, source: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._request({"source": source})

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text; variables are JSON values. Raises `TemplateFailed`."""
        return str(self._request({"variables": variables}))

    def _request(self, message: dict[str, Any]) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # PIPE above
        with self._lock:
            overdue = threading.Timer(_WAIT_S, process.kill)
            overdue.start()
            try:
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                raise TemplateFailed("its process ended") from None
            finally:
                overdue.cancel()
        if "error" in answer:
            raise TemplateFailed(answer["error"], answer.get("line", 0))
        return answer["text"]

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                stream.close()
            process.wait()


def _serve() -> None:
    """Answer each line of JSON on stdin until it ends; the first line is the template."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    signal.signal(signal.SIGPROF, _overdue)
    template: Any = None
    for line in sys.stdin.buffer:
        message = json.loads(line)
        # Python delays the timer's handler during one long operation; the kernel's limit is exact.
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 3, hard))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            if template is None:
                template = _environment().from_string(message["source"])
                answer: dict[str, Any] = {"text": ""}
            else:
                answer = {"text": _rendered(template, message["variables"])}
            text = json.dumps(answer)
        except MemoryError:
            text = json.dumps({"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"})
        except Exception as error:  # a template may raise any error
            failure = {"error": str(error) or type(error).__name__}
            text = json.dumps({**failure, "line": getattr(error, "lineno", 0)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _overdue(*_: Any) -> None:
    raise TimeoutError(f"it takes more than {CPU_S:g} s of CPU time")


def _rendered(template: Any, variables: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in template.generate(**variables):
        parts.append(part)
        length += len(part)
        if length > TEXT_CHARACTERS:
            raise ValueError(f"it makes a text of more than {TEXT_CHARACTERS} characters")
    return "".join(parts)


def _environment() -> Any:
    """Return a Jinja environment with the features that chat templates expect, and no more."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accept `{% generation %}`, which marks answers, without effect."""

        tags = {"generation"}  # noqa: RUF012  # as in the base class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)  # variables set inside stay inside

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, *args: Any, **options: Any) -> str:
        names = ("ensure_ascii", "indent", "separators", "sort_keys")  # in transformers' order
        options = {"ensure_ascii": False, **dict(zip(names, args, strict=False)), **options}
        return json.dumps(value, **options)

    # Templates expect trimmed blocks and loop controls.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment


if __name__ == "__main__":
    _serve()
