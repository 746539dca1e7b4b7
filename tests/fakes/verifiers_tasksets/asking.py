"""A harness whose program asks some times, and then does what its settings say."""

from __future__ import annotations

import sys

import httpx
import verifiers.v1 as vf

PROGRAM = """
import json, os, sys, time, urllib.request
url, key, model, prompt, count, end = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for number in range(int(count)):
    # Another temperature than the policy's, as programs ask for.
    body = json.dumps({"model": model, "messages": messages, "temperature": 0.3}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, head)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    messages.append({"role": "user", "content": f"again {number}"})
if end == "sleep" and messages[1]["content"] == "sleep":
    open(os.environ["ASKING_FILE"], "w").write(str(os.getpid()))
    time.sleep(600)
if end == "fail":
    sys.exit("the program gives up")
"""


class AskingConfig(vf.HarnessConfig):
    count: int = 1
    end: str = ""
    is_inside: bool = False


class AskingHarness(vf.Harness[AskingConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        if self.config.is_inside:
            messages = [{"role": "user", "content": str(data.prompt)}]
            async with httpx.AsyncClient(timeout=None) as client:
                for _ in range(self.config.count):
                    body = {"model": ctx.model, "messages": messages}
                    answer = await client.post(
                        f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                    )
                    answer.raise_for_status()
                    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        values = [endpoint, secret, ctx.model, str(data.prompt), str(self.config.count), self.config.end]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *values], self.config.resolved_env)


__all__ = ["AskingHarness"]
