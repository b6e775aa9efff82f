"""``python -m trainer.generate MODEL --prompt TEXT ...``: text from a checkpoint or a Hugging Face folder, in one process. Started by
``trireme generate``, which uses ``trainer.generate.job`` on ranks if keys of a layout are given."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from trainer.shared.run.command_lines import PRECISIONS, GenerateCommand, asked, generate_parser, texts_of, write_completions
from trainer.shared.run.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input (one line on stderr), 130 interrupted."""
    arguments = generate_parser().parse_args(argv)
    try:
        command = asked(GenerateCommand, arguments)
        prompts = texts_of(command)
        from trainer.generate.job import complete
        from trainer.generate.ranks import alone

        with alone(Path(command.model), PRECISIONS[arguments.dtype], arguments.threads) as (config, world):
            completions = complete(command, prompts, config, world, None if arguments.json else sys.stdout)
        if arguments.out is not None:
            write_completions(arguments.out, completions)
        if arguments.json:
            print(json.dumps(completions))
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `trireme generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
