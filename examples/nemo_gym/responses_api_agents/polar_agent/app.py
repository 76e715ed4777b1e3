"""An agent server of NeMo Gym whose `run` is a session of polar_trl: any coding agent, in a sandbox.

Runs in Gym's own environment, and starts `polar-trl gym` in that of polar_trl: Gym needs another Python. That process
asks Gym's model server, records every call, has the resources server verify the result, and ends with this one.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

try:
    from nemo_gym.base_resources_server import (
        AggregateMetrics,
        AggregateMetricsRequest,
        BaseRunRequest,
        BaseVerifyResponse,
    )
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse
    from nemo_gym.server_utils import get_response_json, get_server_url, raise_for_status, request
except ImportError as error:
    sys.exit(f"polar_agent runs in NeMo Gym's environment ({error}): pip install 'nemo-gym>=0.4,<0.5', Python 3.12")

POLL_INTERVAL_S = 0.5


class PolarAgentConfig(BaseResponsesAPIAgentConfig):
    """What configs/polar_agent.yaml has."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    polar_trl: str
    """The program, of polar_trl's own environment."""
    run_file: str
    """The agent, its sandbox, and how it is sampled."""
    output_dir: str
    """Of the records."""


class Row(BaseRunRequest, extra="allow"):
    """A row of a data set, with the fields that its resources server reads."""


class Verified(BaseVerifyResponse, extra="allow"):
    """The answer of a resources server, or the reason why there is no reward."""


class PolarAgent(SimpleResponsesAPIAgent):
    """Hands each row to `polar-trl gym`."""

    config: PolarAgentConfig

    def setup_webserver(self) -> Any:
        """Start the process that runs sessions, once the model server answers: it is asked a question first."""
        while self.server_client.poll_for_status(self.config.model_server.name) != "success":
            time.sleep(POLL_INTERVAL_S)
        head = self.server_client.head_server_config
        command = [self.config.polar_trl, "gym", "--config", self.config.run_file]
        command += ["--output_dir", self.config.output_dir, "--grader", f"http://{head.host}:{head.port}"]
        command += ["--base_url", f"{get_server_url(self.config.model_server.name)}/v1"]
        command += ["--served_name", self.config.model_server.name]
        # its standard input ends with this process, however that ends, and so does it
        self._sessions = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answer = self._sessions.stdout.readline()
        if not answer:
            sys.exit(f"polar-trl gym ended with exit code {self._sessions.wait()}; what it said is above")
        self._origin = json.loads(answer)["origin"]
        threading.Thread(target=self._end_with_sessions, daemon=True).start()
        return super().setup_webserver()

    async def run(self, body: Row) -> Verified:
        """Run a session of the row."""
        # whatever agent it names: by ours the resources server is found
        row = body.model_dump(exclude_unset=True) | {"agent_ref": {"name": self.config.name}}
        answer = await request("POST", f"{self._origin}/run", json=row)
        await raise_for_status(answer)
        return Verified.model_validate(await get_response_json(answer))

    def _end_with_sessions(self) -> None:
        self._sessions.wait()
        os.kill(os.getpid(), signal.SIGTERM)  # Gym says which of its servers has ended, and stops the others

    async def responses(self) -> NeMoGymResponse:
        """A session has a task and a sandbox, not only messages: there is `run` alone."""
        raise NotImplementedError("polar_agent answers POST /run, with a row of a data set")

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Have the resources server aggregate, as Gym's own agents do."""
        name = self.config.resources_server.name
        answer = await self.server_client.post(server_name=name, url_path="/aggregate_metrics", json=body)
        await raise_for_status(answer)
        return AggregateMetrics.model_validate(await get_response_json(answer))


if __name__ == "__main__":
    PolarAgent.run_webserver()
