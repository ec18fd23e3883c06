# One flavour: upstream's static libraries with our sources in them, linked into one cffi module.
function(pyggml_spec_configure_ggml flavour)
    # ggml's own option() calls must not override what is set here.
    set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
    set(BUILD_SHARED_LIBS OFF)
    # Every instruction set is named: upstream's defaults change with SOURCE_DATE_EPOCH and with the machine.
    foreach(option NATIVE SSE42 AVX AVX_VNNI AVX2 BMI2 FMA F16C AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16
                   AMX_TILE AMX_INT8 AMX_BF16)
        set(GGML_${option} OFF)
    endforeach()
    pyggml_spec_ask_flavours(options options "${flavour}")
    foreach(option IN LISTS options)
        string(REGEX MATCH "^([^=]+)=(.+)$" matched "${option}")
        set(GGML_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
    endforeach()
    # One persistent thread pool per backend is four times cheaper per graph than OpenMP.
    set(GGML_OPENMP OFF)
    set(GGML_LLAMAFILE OFF)
    set(GGML_CPU_REPACK ON)
    set(GGML_ACCELERATE OFF)
    set(GGML_ALL_WARNINGS OFF)
    # Upstream would ask git about the folder it lies in, which is this repository.
    set(GIT_EXE "")
    set(GGML_BUILD_COMMIT "${upstream_commit}")
    add_subdirectory("${upstream_dir}/ggml" ggml EXCLUDE_FROM_ALL)
endfunction()

function(pyggml_spec_add_sources)
    file(GLOB base_sources CONFIGURE_DEPENDS "${vendor_dir}/ggml-spec/base/*.c" "${vendor_dir}/ggml-spec/base/*.cpp")
    file(GLOB cpu_sources CONFIGURE_DEPENDS "${vendor_dir}/ggml-spec/cpu/*.c" "${vendor_dir}/ggml-spec/cpu/*.cpp")
    target_include_directories(ggml-base PUBLIC "${vendor_dir}/ggml-spec/include")
    target_sources(ggml-base PRIVATE ${base_sources})
    target_sources(ggml-cpu PRIVATE ${cpu_sources})
    foreach(target ggml-base ggml-cpu)
        set_source_files_properties(${base_sources} ${cpu_sources} TARGET_DIRECTORY ${target}
            PROPERTIES COMPILE_OPTIONS "-Wall;-Wextra;-Wno-unused-function")
    endforeach()
endfunction()

function(pyggml_spec_add_extension flavour)
    pyggml_spec_configure_ggml("${flavour}")
    pyggml_spec_add_sources()
    if(TARGET ggml-cuda)
        pyggml_spec_add_cuda_sources()
    endif()

    set(module "_ggml_${flavour}")
    set(binding "${CMAKE_BINARY_DIR}/${module}.c")
    add_custom_command(
        OUTPUT "${binding}"
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/generate_binding.py"
                "pyggml_spec._native.${module}" "${native_dir}" "${binding}"
        DEPENDS cmake/generate_binding.py "${native_dir}/cdef.h" "${native_dir}/prologue.h"
        VERBATIM)
    add_library(${module} MODULE "${binding}")
    set_target_properties(${module} PROPERTIES PREFIX "" SUFFIX ".abi3.so")
    target_include_directories(${module} PRIVATE ${Python_INCLUDE_DIRS})
    # A declaration in cdef.h that no longer fits a header must stop the build.
    target_compile_options(${module} PRIVATE
        -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Wno-deprecated-declarations)
    # Another ggml in the process must see none of our symbols.
    target_link_options(${module} PRIVATE -Wl,--exclude-libs,ALL)
    target_link_libraries(${module} PRIVATE ggml ggml-cpu ggml-base)
    # Upstream's device code needs no device linking, so the host's linker does for every flavour.
    set_target_properties(${module} PROPERTIES LINKER_LANGUAGE CXX)
    add_custom_command(TARGET ${module} POST_BUILD VERBATIM COMMAND "${CMAKE_COMMAND}" "-DNM=${CMAKE_NM}"
        "-DMODULE=$<TARGET_FILE:${module}>" -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/check_symbols.cmake")
    install(TARGETS ${module} LIBRARY DESTINATION pyggml_spec/_native COMPONENT pyggml_spec)
endfunction()
