@echo off
rem Runs install.py by a Python of ComfyUI, else by the launcher "py".
setlocal
set "PYTHON=py -3"
for %%p in (
  "%~dp0..\..\.venv\Scripts\python.exe"
  "%~dp0..\..\venv\Scripts\python.exe"
  "%~dp0..\..\..\python_embeded\python.exe"
  "%CD%\python_embeded\python.exe"
) do if exist %%p set PYTHON=%%p
%PYTHON% -s "%~dp0install.py" %*
pause
