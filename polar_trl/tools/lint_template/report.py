"""Report the findings of a lint: turns, policies, and the verdict in a sentence.

A model is exact whose agents meet no fork, no template error and no unreadable tool call.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polar_trl.tools.lint_template.compare import Rewrite
from polar_trl.tools.lint_template.load import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReport:
    """One assistant turn."""

    call: int
    """Index of the call that sampled it; of a recorded session, among those that sampled anything."""
    name: str
    num_tokens: int
    """Sampled ones."""
    is_followed: bool
    """Whether a later request has it in its history; False: nothing could be compared."""
    rewrites: tuple[Rewrite, ...]
    """Each new kind of rewriting, in the order of calls."""
    forks_at: Mapping[Policy, int | None]
    """Per policy, the first call whose prompt does not have the turn as sampled; None where all have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextChange:
    """Messages other than the model's that the template writes otherwise once more follow."""

    call: int
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """Trajectories and forks of the conversation under one policy."""

    trajectories: int
    conversations: int
    """Conversations that the agent began: a trajectory each, where nothing forks."""
    forks: int
    """Calls that went on from an earlier one, but were rendered anew."""
    refusal: str | None
    """The template's error on one of the requests, at which the conversation ended here."""

    @property
    def is_exact(self) -> bool:
        """Tell whether every call continues from the sampled tokens."""
        return self.forks == 0 and self.refusal is None


@dataclass(frozen=True, kw_only=True, slots=True)
class LintReport:
    """The findings of a lint; `render` gives the keys of the JSON report."""

    model: str
    renderer: str
    why: tuple[str, ...]
    limits: tuple[str, ...]
    source: str
    """"probe", or the path of the recorded session."""
    policy: Policy
    refusal: str | None
    """Why no reply can be continued, under any policy."""
    turns: tuple[TurnReport, ...]
    context_changes: tuple[ContextChange, ...]
    policies: Mapping[Policy, PolicyReport]
    unreadable: tuple[int, ...]
    """Calls whose tool calls cannot be read back from what the model samples."""
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Tell whether agents can go on from the sampled tokens, under the policy that was asked about."""
        return self.policies[self.policy].is_exact and not self.unreadable

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        found = self.policies[self.policy]
        rewritten = sum(bool(turn.rewrites) for turn in self.turns)
        of_turns = f"{rewritten} of {sum(turn.is_followed for turn in self.turns)} turns"
        if found.refusal is not None:
            return f"no: the template refuses a conversation that agents have ({found.refusal})"
        if self.refusal is not None:
            return f"no: no reply can be continued, every call is rendered anew ({self.refusal})"
        if self.unreadable:
            return f"no: the tool calls of call {self.unreadable[0]} cannot be read back from what the model samples"
        if found.forks:
            calls = "1 call is" if found.forks == 1 else f"{found.forks} calls are"
            return (
                f"no: {calls} rendered anew, which begins another trajectory; all are still trained in the context "
                f"that they were sampled in, at the cost of {found.trajectories} trajectories instead of "
                f"{found.conversations}"
            )
        if rewritten:
            return (
                f"yes: every call continues from the sampled tokens; prompts keep {of_turns} that the template alone "
                "would write otherwise"
            )
        return "yes: every call continues from the sampled tokens, and the template would write the same"

    def render(self) -> dict[str, Any]:
        """Render the JSON of `--json`."""
        plain = asdict(self)
        for name, policy in self.policies.items():
            plain["policies"][name]["exact"] = policy.is_exact
        return {"exact": self.is_exact, "verdict": self.verdict, **plain}
