"""What pyproject.toml cannot say: a wheel also holds recipes/ and studies/, which stand beside src/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            for folder in ("recipes", "studies"):
                to = Path(self.build_lib, "trailmark/shipped", folder)
                to.mkdir(parents=True, exist_ok=True)
                for file in Path(folder).glob("*.yaml"):
                    shutil.copyfile(file, to / file.name)


setup(cmdclass={"build_py": WithRecipes})
