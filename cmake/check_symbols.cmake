# Run after linking: cmake -DNM=.. -DMODULE=.. -P check_symbols.cmake. The linker accepts a module with unresolved names
# (Python's own stay unresolved), so a declared but undefined function would only be noticed when it is imported.
execute_process(COMMAND "${NM}" -D "${MODULE}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " U [^\n]*ggml[^\n]*" undefined "${symbols}")
string(REGEX MATCHALL " [TDBRVWu] [^\n]*ggml[^\n]*" exported "${symbols}")
list(FILTER exported EXCLUDE REGEX "PyInit_")
if(undefined OR exported)
    file(REMOVE "${MODULE}")
    message(FATAL_ERROR "${MODULE} must be self-contained: undefined [${undefined}], exported [${exported}].")
endif()
