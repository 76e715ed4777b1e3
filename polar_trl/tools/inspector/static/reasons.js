// Explanations of the states of sampled tokens that were not trained, in one clause each.

export const REASONS = {
  auxiliary: "sampled for the agent's side business (a title, a summary); never trained",
  superseded: "copies of a retried request that the agent did not go on from",
  no_reward: "the session has no reward, so it enters no baseline and no gradient",
  zero_variance: "all sessions of the group have one reward, which teaches nothing",
  cut: "a limit ended the session, and the run does not train such ones (cut_sessions)",
  not_chosen: "the run trains other calls of the session (train_turns)",
  too_long: "beyond the longest trajectory that the run trains",
  stale: "sampled by a policy that was too old when its turn came",
  evaluation: "an evaluation trains nothing",
  too_long_or_stale: "no row was made of it: too long, or sampled by a policy that was too old",
};
