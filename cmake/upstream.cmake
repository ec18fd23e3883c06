# Unpacks the pinned upstream with our edits to upstream_dir; the script decides where it comes from.
set(vendor_dir "${CMAKE_CURRENT_SOURCE_DIR}/vendor")
# Not INTERNAL: that would empty it when a parent's child configures itself again, and compile everything anew.
set(PYGGML_SPEC_UPSTREAM_DIR "" CACHE PATH "upstream as a parent build has prepared it")
mark_as_advanced(PYGGML_SPEC_UPSTREAM_DIR)

if(PYGGML_SPEC_UPSTREAM_DIR)
    set(upstream_dir "${PYGGML_SPEC_UPSTREAM_DIR}")
else()
    set(upstream_dir "${CMAKE_BINARY_DIR}/upstream")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${vendor_dir}/prepare_upstream.py" sync "${upstream_dir}"
        RESULT_VARIABLE failed ERROR_VARIABLE complaint ERROR_STRIP_TRAILING_WHITESPACE)
    if(failed)
        message(FATAL_ERROR "${complaint}")
    endif()
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${vendor_dir}/prepare_upstream.py" "${vendor_dir}/upstream.txt" "${vendor_dir}/upstream.toml" "${vendor_dir}/edits.toml")

file(STRINGS "${vendor_dir}/upstream.txt" pin REGEX "sha256:")
string(REGEX REPLACE ".*sha256:([0-9a-f]+).*" "\\1" upstream_commit "${pin}")
string(SUBSTRING "${upstream_commit}" 0 12 upstream_commit)
