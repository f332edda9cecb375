"""Runs every test beside this file, and ends with a line in cargo's words. Arguments choose tests, as for unittest -k."""

import pathlib
import sys
import unittest

loader = unittest.TestLoader()
loader.testNamePatterns = [f"*{word}*" for word in sys.argv[1:]] or None
suite = loader.discover(str(pathlib.Path(__file__).parent))
result = unittest.TextTestRunner(verbosity=1).run(suite)

for test, reason in result.skipped:
    print(f"skipped: {test}: {reason}")
# A test fails once, however many of its parts do.
failed = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
passed = result.testsRun - len(result.skipped) - len([name for name in failed if not name.startswith("setUp")])
verdict = "FAILED" if failed or not passed else "ok"
print(f"test result: {verdict}. {passed} passed; {len(failed)} failed; {len(result.skipped)} ignored;")
sys.exit(verdict != "ok")
