"""Fails a run in which no test was executed, even if every test was skipped with a reason."""

import pytest


class _Ran:
    def __init__(self) -> None:
        self.any_test = False
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (not report.skipped or hasattr(report, "wasxfail")):
            self.any_test = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and not self.any_test and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            self.failed = True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.failed:
            terminalreporter.write_line("error: no test was executed", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Ran())
