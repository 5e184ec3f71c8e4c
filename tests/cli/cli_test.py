import errno
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import cli_testing
import click
import warm_python
from absl.testing import absltest, parameterized

import tfcdo.version
from tfcdo import __main__, log
from tfcdo.cli import commands, options

# Runs the command as its console script does, as if a module were not installed.
_ENTRY = """
import sys
sys.modules[sys.argv[1]], sys.argv = None, ["tfcdo", *sys.argv[2:]]
from tfcdo.__main__ import main; main()
"""


class CommandTest(cli_testing.CommandTestCase):
    def test_version_and_help_do_not_wait_for_tensorflow(self):
        script = (
            "import sys; from tfcdo.cli import commands\n"
            "commands.run(['--version']); commands.run([])\n"
            "for name in commands.COMMANDS: print(commands.run([name, '--help']))\n"
            "assert 'tensorflow' not in sys.modules"
        )
        result = warm_python.run_cold("-c", script)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertStartsWith(result.stdout, f"tfcdo {tfcdo.version.__version__}\n")
        self.assertEqual(result.stdout.count("\n0\n"), len(commands.COMMANDS))
        for name in commands.COMMANDS:
            self.assertRegex(result.stdout, f"(?m)^  {name} ")
            self.assertIn(f"Usage: tfcdo {name} [OPTIONS]", result.stdout)

    @parameterized.parameters(
        (("no-such-command",), "'no-such-command': there are doctor"),
        (("--no-such-option",), "; see tfcdo --help"),
        (("doctor", "x"), "files require --blackbox; see tfcdo doctor --help"),
        (("plan",), "--topology names the machine: dgx1, dgx1_p100, "),
        (("doctor", "--devices", "many"), "--devices"),
        (("trace", "--seconds", "inf"), "--seconds"),
        (("plan", "-t", "pcie", "-b"), "requires an argument; see tfcdo plan --help"),
    )
    def test_a_wrong_argument_gets_one_line(self, arguments: tuple[str, ...], named: str):
        self.assert_refused(re.escape(named), *arguments)

    @parameterized.parameters(
        ("click", "cli", "launch", "script.py"),
        ("psutil", "cli", "launch", "script.py"),
        ("networkx", "cli", "plan", "--topology", "dgx1", "--draw", "a.png"),
        ("matplotlib", "plot", "plan", "--topology", "dgx1", "--draw", "a.png"),
    )
    def test_a_missing_package_gets_one_line_with_the_remedy(self, package, extra, *arguments):
        result = warm_python.run_cold("-c", _ENTRY, package, *arguments)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        remedy = f"in a clone of tfcdo, pip install '.[{extra}]'"
        self.assertEqual(result.stderr, f"tfcdo: {package} is not installed: {remedy}\n")

    @parameterized.parameters(
        (OSError(errno.EMFILE, "Too many open files"), 1, "tfcdo: Too many open files\n"),
        (KeyboardInterrupt(), 130, "\ntfcdo: interrupted\n"),
    )
    def test_other_errors_get_one_line(self, error, status, line):
        command = click.Command("failing", callback=mock.Mock(side_effect=error))
        with mock.patch.object(commands.LazyGroup, "get_command", return_value=command):
            result = cli_testing.run_tfcdo("failing")
        self.assertEqual((result.status, result.errors), (status, line))

    def test_an_interrupted_start_gets_no_traceback(self):
        self.enter_context(mock.patch.object(commands, "run", side_effect=KeyboardInterrupt))
        self.assertRaisesRegex(SystemExit, "^130$", __main__.main)

    def test_a_missing_module_that_no_extra_brings_is_not_hidden(self):
        result = warm_python.run_cold("-c", _ENTRY, "tfcdo.cli.commands", "--version")
        self.assertIn("ModuleNotFoundError", result.stderr)

    @parameterized.parameters(
        ("--help >&-", "standard output is closed"),
        ("plan -t nvswitch:2 -b 1K >/dev/full", "standard output: " + os.strerror(errno.ENOSPC)),
    )
    def test_output_that_does_not_get_through(self, shell: str, named: str):
        script = f"exec {shlex.join([sys.executable, '-c', _ENTRY, 'none'])} {shell}"
        # Python flushes a buffered output once more at its end, and may complain a second time.
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=variables)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, rf"^tfcdo: .*{re.escape(named)}.*\n$")

    def test_a_closed_standard_error_stops_nothing(self):
        script = f"exec {shlex.join([sys.executable, '-c', _ENTRY, 'none'])} plan -t pcie:2 2>&-"
        self.assertIn("Bound:", subprocess.check_output(["sh", "-c", script], text=True))


class OptionsTest(parameterized.TestCase):
    @parameterized.parameters(
        (options.parse_size, {
            "8": 8, "8B": 8, "64K": 65_536, "64k": 65_536, "64KiB": 65_536, "64KB": 64_000,
            "1.5K": 1536, "100M": 100 * 2**20, "100MB": 10**8, "2G": 2**31, "2gb": 2 * 10**9,
            "9007199254740993": 2**53 + 1, "9223372036854775807": 2**63 - 1,
        }),
        (options.parse_bandwidth, {
            "1gbit": 125e6, "10Gbit": 1.25e9, "2.5mbit": 312_500.0, "12.5G": 12.5e9,
        }),
        (log.format_bytes, {
            0: "0 B", 999: "999 B", 1000: "1.00 kB", 10**8: "100 MB", 25 * 10**8: "2.50 GB",
            4 * 10**12: "4000 GB", 999_499: "999 kB", 999_999: "1.00 MB", 99_960_000: "100 MB",
        }),
        (log.format_seconds, {
            0.0: "0 s", 2.0: "2.000 s", 0.01204: "12.04 ms", 4e-7: "0.4000 µs",
            9.99999e-4: "1.000 ms", 0.9999: "999.9 ms", 12345.6: "12350 s",
        }),
    )  # fmt: skip
    def test_numbers_and_their_texts(self, convert, expected):
        self.assertEqual({given: convert(given) for given in expected}, expected)

    @parameterized.parameters(
        (options.parse_size, "not a number of bytes such as", "", "0", "0.1", "8X", "8KK", "8IB"),
        (options.parse_size, r"^there can be at most 2\^63 - 1 bytes$", str(2**63), "8589934592G"),
        (options.parse_size, r"^there can be at most", "1" * 400, "1" * 5000 + ".5K"),
        (
            *(options.parse_bandwidth, "not a bandwidth such as"),
            *("", "0gbit", "-1gbit", "1gbit; reboot", "9" * 400 + "gbit"),
        ),
    )
    def test_refused(self, parse, message: str, *texts: str):
        for text in texts:
            self.assertRaisesRegex(ValueError, message, parse, text)

    def test_number(self):
        whole, time = options.number(1, 16), options.number(0.5, kind=float)
        self.assertEqual([*map(whole, ("1", "16", 4)), time("2.5")], [1, 16, 4, 2.5])
        for kind, text, limits in (
            *((whole, text, "from 1 to 16") for text in ("0", "17", "1.5", "x", "9" * 5000)),
            *((time, text, "of at least 0.5") for text in ("0.4", "nan", "-inf", "")),
        ):
            with self.assertRaisesRegex(click.UsageError, f"expected a number {limits}; got '"):
                kind(text)

    def test_a_letter_has_one_meaning_in_all_commands(self):
        meanings: dict[str, set[str]] = {}
        for name in commands.COMMANDS:
            for parameter in commands.tfcdo.get_command(mock.Mock(), name).params:
                for option in parameter.opts:
                    if len(option) == 2:
                        meanings.setdefault(option, set()).add(max(parameter.opts, key=len))
        several = {letter for letter, words in meanings.items() if len(words) > 1}
        self.assertEqual(several, {"-b", "-g"})
        self.assertEqual(meanings["-b"], {"--bytes", "--minbytes"})
        self.assertEqual(meanings["-g"], {"--devices", "--devices-per-worker"})

    def test_a_file_that_cannot_be_written(self):
        self.enter_context(mock.patch.object(os, "access", return_value=False))
        with self.assertRaisesRegex(click.UsageError, "no permission to write 'out.json'"):
            options.new_file(".json")("out.json")

    def test_holds_back_what_is_written_to_the_file_descriptor(self):
        script = (
            "import os, sys, click; from tfcdo.cli.options import quiet_start\n"
            "with quiet_start(): os.write(2, b'noise'); print('noise', file=sys.stderr)\n"
            "os.write(2, b'news')\n"
            # The user knows the reason of these.
            "for error in (click.UsageError('wrong'), KeyboardInterrupt()):\n"
            "    try:\n"
            "        with quiet_start(): os.write(2, b'noise'); raise error\n"
            "    except (click.UsageError, KeyboardInterrupt): os.write(2, b', more')\n"
            # It is shown when the start fails.
            "with quiet_start(): os.write(2, b', the reason'); raise SystemExit(3)"
        )
        result = warm_python.run_cold("-c", script)
        self.assertEqual((result.returncode, result.stderr), (3, "news, more, more, the reason"))


if __name__ == "__main__":
    absltest.main()
