"""Whatever a person types after the verb either composes to a valid run or ends in one plain error."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config import compose, resolve
from launcher.config.compose import config_groups, known_keys
from tests.draws import draws
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError

HOSTILE = ["'", '"', "$(touch pwned)", "`id`", "; rm -rf /", "a\nb", "\\", "${", "${model.hidden}", "${oc.env:HOME}", "{a: 1", "[1,", "a=b=c", "é∑", "\t", "\0",
           "%s", "null", "???", "../../etc/passwd", "--help", "-1", "1e999", "1,2", "range(1,4)", "nan", "0x10", "1_000", "on", "x" * 500]  # fmt: skip
values = st.one_of(
    st.sampled_from(HOSTILE),
    st.integers(-3, 64).map(str),
    st.floats().map(repr),
    st.sampled_from(["true", "false", "gpt", "llama", "1f1b", "interleaved", "selective", "fp64", "corpus"]),
    st.text(max_size=12),
)
keys = st.one_of(st.sampled_from(sorted(known_keys())), st.sampled_from(sorted(config_groups())), st.text(max_size=10))
overrides = st.lists(
    st.builds(lambda prefix, k, v: f"{prefix}{k}={v}", st.sampled_from(["", "", "", "+", "++", "~"]), keys, values), max_size=4
)


@draws(gate=60, campaign=3000)
@given(overrides)
@example(["cluster=" + 300 * "x"])
@example(["engine=" + 300 * "x"])
@example(["trainer=" + 300 * "x"])
def test_any_override_list_is_a_valid_run_or_one_plain_error(lines: list[str]) -> None:
    try:
        config = resolve(compose(lines))
    except ConfigError as error:
        assert str(error).strip()
        assert len(str(error).splitlines()) <= 4
    else:
        assert world_size_of(config.layout) <= config.cluster.world_size
        assert config.model.heads % config.layout.tensor == 0
