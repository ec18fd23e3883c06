# Which flavours to build. _native/flavours.py is the only place that knows them.
function(pyggml_spec_ask_flavours result)
    execute_process(COMMAND "${Python_EXECUTABLE}" -I "${native_dir}/flavours.py" ${ARGN}
        OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(${result} "${answer}" PARENT_SCOPE)
endfunction()

function(pyggml_spec_flavours result)
    set(names "${PYGGML_SPEC_FLAVOURS}")
    if(names STREQUAL "default" OR names STREQUAL "all")
        pyggml_spec_ask_flavours(names ${names})
    endif()
    if(NOT names)
        message(FATAL_ERROR "No flavour fits this ${CMAKE_SYSTEM_PROCESSOR} machine: it needs x86-64 with SSE4.2 or 64-bit ARM.")
    endif()
    if(PYGGML_SPEC_CUDA AND NOT "cuda" IN_LIST names)
        list(APPEND names cuda)
    endif()
    if(NOT "cuda" IN_LIST names AND NOT PYGGML_SPEC_CUDA_ARCHITECTURES STREQUAL "native")
        message(FATAL_ERROR "PYGGML_SPEC_CUDA_ARCHITECTURES=${PYGGML_SPEC_CUDA_ARCHITECTURES} names cards, but no CUDA flavour is "
                            "built: set PYGGML_SPEC_CUDA=ON as well, or leave the architectures out.")
    endif()
    foreach(name IN LISTS names)
        pyggml_spec_ask_flavours(options options "${name}")
        if(NOT options)
            pyggml_spec_ask_flavours(all all)
            message(FATAL_ERROR "PYGGML_SPEC_FLAVOURS names '${name}', which is not one of: default, all, native, cuda, ${all}.")
        endif()
    endforeach()
    set(${result} "${names}" PARENT_SCOPE)
endfunction()

# One child build per flavour: upstream's targets can exist only once in a project. The children run one after another,
# each with all jobs.
function(pyggml_spec_add_children names)
    include(ExternalProject)
    string(REPLACE ";" "," architectures "${PYGGML_SPEC_CUDA_ARCHITECTURES}")
    foreach(name IN LISTS names)
        set(own_args "")
        if(name STREQUAL "cuda")
            set(own_args "-DPYGGML_SPEC_CUDA_ARCHITECTURES=${architectures}"
                         "-DPYGGML_SPEC_CUDA_DEVELOPMENT=${PYGGML_SPEC_CUDA_DEVELOPMENT}")
        endif()
        ExternalProject_Add(${name}
            SOURCE_DIR "${CMAKE_CURRENT_SOURCE_DIR}"
            BINARY_DIR "${CMAKE_BINARY_DIR}/${name}"
            INSTALL_COMMAND ""
            BUILD_ALWAYS ON
            USES_TERMINAL_CONFIGURE ON
            USES_TERMINAL_BUILD ON
            LIST_SEPARATOR ,
            CMAKE_ARGS
                "-DPYGGML_SPEC_FLAVOURS=${name}"
                "-DPYGGML_SPEC_UPSTREAM_DIR=${upstream_dir}"
                "-DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE}"
                "-DPython_EXECUTABLE=${Python_EXECUTABLE}"
                "-DPython_INCLUDE_DIR=${Python_INCLUDE_DIRS}"  # not found again by itself for some virtual environments
                "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
                ${own_args})
        install(FILES "${CMAKE_BINARY_DIR}/${name}/_ggml_${name}.abi3.so" DESTINATION pyggml_spec/_native COMPONENT pyggml_spec)
    endforeach()
endfunction()
