"""Rules, secrets, names, exit codes."""

from __future__ import annotations

from tests.planted.defect import Defect

DEFECTS = [
    Defect(
        "a password in an address without a user is stored in clear",
        "launcher/config/secrets.py",
        r'"an address with a password": r"://[^/\s:@]*:[^/\s@]+@",',
        r'"an address with a password": r"://[^/\s:@]+:[^/\s@]+@",',
        "tests/config/test_addresses.py tests/config/test_secrets.py",
    ),
    Defect(
        "a secret behind an option is stored in clear",
        "launcher/config/secrets.py",
        'and names_a_secret(item.lstrip("-"), following):',
        "and names_a_secret(item, ''):",
        "tests/config/test_secrets.py",
    ),
    Defect(
        "a refused secret is repeated in the error",
        "launcher/config/secrets.py",
        'raise ConfigError(f"tracking.uri holds {what} in clear,',
        'raise ConfigError(f"tracking.uri={uri} holds {what} in clear,',
        "tests/config/test_secrets.py",
    ),
    Defect(
        "wrong input ends with the code of a failure",
        "launcher/cli/main.py",
        '        print(f"error: {shown(error)}", file=sys.stderr)\n        return ConfigError.exit_code\n    except OSError',
        '        print(f"error: {shown(error)}", file=sys.stderr)\n        return 1\n    except OSError',
        "tests/config/test_wrong_input.py",
    ),
    Defect(
        "a value in base 60 is a number",
        "launcher/config/misread.py",
        '_NO_TEXT = ("tag:yaml.org,2002:int", ',
        "_NO_TEXT = (",
        "tests/config/test_misread.py",
    ),
    Defect(
        "products of 8 bits run on a device that has none",
        "launcher/config/rules.py",
        'and not device.host and "fp8" not in device.peak_tflops:',
        'and device.host and "fp8" not in device.peak_tflops:',
        "tests/config/test_wrong_input.py tests/config/test_hardware_files.py",
    ),
    Defect(
        "an example that is wrapped is two commands",
        "launcher/cli/parser.py",
        'yield line + "\\\\"',
        "yield line",
        "tests/config/test_help.py",
    ),
    Defect(
        "help imports Hydra",
        "launcher/cli/train.py",
        '    if {"-h", "--help"} & {*argv}:',
        '    import hydra  # noqa: F401\n\n    if {"-h", "--help"} & {*argv}:',
        "tests/config/test_help.py",
    ),
    Defect(
        "an interpolation in a text that is set is resolved",
        "launcher/config/text_keys.py",
        'return in_quotes(re.sub(r"(\\\\*)\\$\\{", r"\\1\\1\\\\${", text))',
        "return in_quotes(text)",
        "tests/config/test_text_keys.py",
    ),
    Defect(
        "a dot in the name of a label makes it two keys",
        "launcher/config/compose.py",
        "    if (named := _entry(key, backend)) is not None:",
        "    if (named := _entry(key, backend)) is None and key is None:",
        "tests/config/test_text_keys.py",
    ),
    Defect(
        "what a search has written since a process began is not found",
        "launcher/config/folders.py",
        "def _files_in(folder: Path)",
        "@cache\ndef _files_in(folder: Path)",
        "tests/config/test_jobs.py -k written",
    ),
    Defect(
        "a value of a wrong type is left out in silence",
        "launcher/config/jobs.py",
        "if (plain := base.plain_with(wanted)) is not None:",
        "if (plain := base.sections) is not None:",
        "tests/config/test_wrong_input.py",
    ),
]
